"use strict";
const pressed = (button) => button.getAttribute("aria-pressed") === "true";
const press = (button, on) => button.setAttribute("aria-pressed", String(on));

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
  document.getElementById("everywhere").append(copy);
}
for (const button of all(".scale")) {
  button.addEventListener("click", () => {
    press(button, !pressed(button));
    draw(button.closest(".panel").querySelector(".plot"));
  });
}

// Tables: a row is shown where all filters are on for it and every searched word is in it.
function filter(table) {
  const groups = table.id === "ledger" ? all(".filter") : [], rows = all("tbody tr", table);
  const words = document.querySelector(`.search[data-table="${table.id}"]`).value.toLowerCase().split(/\s+/);
  const on = groups.map((group) => [group.dataset.filter, new Set(all(".toggle", group).filter(pressed).map((button) => button.dataset.value))]);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !(on.every(([name, values]) => values.has(row.dataset[name])) && words.every((word) => text.includes(word)));
  }
  document.querySelector(`.found[data-table="${table.id}"]`).textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
}
for (const table of ["ledger", "table"].map((id) => document.getElementById(id))) {
  document.querySelector(`.search[data-table="${table.id}"]`).addEventListener("input", () => filter(table));
  filter(table);
}
for (const button of all(".filter .toggle")) {
  button.addEventListener("click", () => {
    press(button, !pressed(button));
    filter(document.getElementById("ledger"));
  });
}
// A link to a claim that a filter hides shows it.
function reveal() {
  const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (row && row.hidden) {
    row.hidden = false;
    row.scrollIntoView();
  }
}
addEventListener("hashchange", reveal);

// Table of runs: a click on a heading sorts, numbers as numbers.
all("#table .sort").forEach((button, column) => button.addEventListener("click", () => {
  const heading = button.parentElement, down = heading.getAttribute("aria-sort") === "ascending";
  all("#table th[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.children[column].dataset.sort || row.children[column].textContent.trim();
  const order = (a, b) => (a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b, "en", { numeric: true }));
  const body = document.querySelector("#table tbody");
  body.append(...all("tr", body).sort((a, b) => order(value(a), value(b)) * (down ? -1 : 1)));
}));

// Dark or light.
const theme = document.getElementById("theme");
function paint(name) {
  root.dataset.theme = name;
  theme.textContent = name === "dark" ? "Light" : "Dark";
  for (const swatch of all(".swatch")) swatch.style.color = visible(swatch.dataset.colour);
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
  all(".plot:not([data-drawn])").forEach(draw);
  paint("light");
});
addEventListener("afterprint", () => paint(before));
