// Dark or light as was last chosen, or else as the system has it; before anything is painted.
{
  let chosen = null;
  try { chosen = localStorage.getItem("stabilitylab-theme"); } catch { /* not kept where storage is closed */ }
  document.documentElement.dataset.theme = chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}
