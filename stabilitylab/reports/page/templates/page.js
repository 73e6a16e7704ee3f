"use strict";

// Toggles of a figure act on all its panels; those above all figures act on every figure that has the series.
function show(figure, key, on) {
  if (!hidden.has(figure)) hidden.set(figure, new Set());
  hidden.get(figure)[on ? "delete" : "add"](key);
  all(".toggle", figure).filter((button) => button.dataset.key === key).forEach((button) => press(button, on));
  redraw(figure);
}
const shared = new Map();
for (const button of all("figure .toggle")) {
  const figure = button.closest("figure");
  button.addEventListener("click", () => show(figure, button.dataset.key, !pressed(button)));
  if (figure.closest("#figures")) shared.set(button.dataset.key, [...(shared.get(button.dataset.key) || []), button]);
}
for (const [key, buttons] of shared) {
  if (buttons.length < 2) continue;
  const copy = buttons[0].cloneNode(true);
  copy.addEventListener("click", () => {
    press(copy, !pressed(copy));
    buttons.forEach((button) => show(button.closest("figure"), key, pressed(copy)));
  });
  byId("everywhere").append(copy);
}
for (const button of all(".scale, .logx")) {
  button.addEventListener("click", () => {
    press(button, !pressed(button));
    zooms.delete(zoomOf(button.closest(".panel").querySelector(".plot")));
    draw(button.closest(".panel").querySelector(".plot"));
  });
}

// Dark or light.
const theme = byId("theme");
function paint(name) {
  root.dataset.theme = name;
  theme.textContent = name === "dark" ? "Light" : "Dark";
  for (const swatch of all(".swatch[data-colour]")) swatch.style.color = visible(swatch.dataset.colour);
  paintTable();
  return redraw();
}
theme.addEventListener("click", () => {
  const name = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("stabilitylab-theme", name); } catch { /* not kept where storage is closed */ }
  paint(name);
});
paint(root.dataset.theme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (system) => paint(system.matches ? "dark" : "light"));

// A plot is drawn when it comes near the window, and all of them, in light, before printing: that must not wait, so
// maps are unpacked beforehand.
addEventListener("load", async () => {
  for (const { map } of Object.values(plots).flat()) if (map) await unpacked(map).catch(() => null);
});
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((each) => each.isIntersecting)) {
    watcher.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "400px" });
all(".plot").forEach((place) => watcher.observe(place));
let before = "";
addEventListener("beforeprint", () => {
  before = root.dataset.theme;
  root.classList.add("printing"); // what is drawn has the size of its place on the sheet
  all(".plot:not([data-drawn])").filter((place) => place.checkVisibility()).forEach(draw);
  paint("light");
});
addEventListener("afterprint", () => {
  root.classList.remove("printing");
  paint(before);
});

if (byId("smooth")) {
  const slider = byId("smooth"), said = byId("smooth-shown"), tell = () => { said.textContent = view.smooth ? `${view.smooth} %` : "off"; };
  slider.value = view.smooth;
  slider.addEventListener("input", () => look({ smooth: +slider.value }));
  listeners.push(tell);
  tell();
}
if (byId("map-panels")) buildMaps();
if (byId("compare")) buildPair();
