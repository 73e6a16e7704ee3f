"use strict";
const plots = JSON.parse(document.getElementById("plots").textContent);
const told = JSON.parse(document.getElementById("told").textContent);
for (const plot of plots.curves || []) plot.runs = true; // one line a run
const root = document.documentElement;
const flat = { "exactly 0": "#ffffff", "no gradient": "#bdbdbd", "not finite": "#d7191c", "diverged": "#d7191c", "stuck": "#bdbdbd" };
const codes = { "exactly 0": 1, "no gradient": 2, "not finite": 3, "diverged": 4, "stuck": 5 }, first = 6, levels = 16384;
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const byId = (id) => document.getElementById(id);
const escaped = (text) => text.replace(/[&<>]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[letter]);
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`); // for a shell
const narrow = () => innerWidth < 640;
const pressed = (button) => button.getAttribute("aria-pressed") === "true";
const press = (button, on) => button.setAttribute("aria-pressed", String(on));
function made(name, facts = {}, ...inside) {
  const element = Object.assign(document.createElement(name), facts);
  element.append(...inside);
  return element;
}

// A patch of a colour beside a word; that of a finding is drawn as in the maps.
function patchOf(background) {
  const patch = made("i", { className: "patch" });
  patch.style.background = background;
  return patch;
}
// What is not finite is striped, so that grey print tells it from a dark colour.
const lookOfFinding = (name) => (name === "not finite" ? `repeating-linear-gradient(to right, ${flat[name]} 0 3px, #fff 3px 4px)` : flat[name]);

// Dark colours are too faint on a dark page: they are mixed with white there.
function visible(colour) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const light = (0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]) / 255;
  if (root.dataset.theme !== "dark" || light > 0.4) return colour;
  const white = Math.min(0.85, (0.45 - light) * 2);
  return "#" + parts.map((x) => Math.round(x + (255 - x) * white).toString(16).padStart(2, "0")).join("");
}

// Viridis, as in the maps: sixteen of its colours and straight lines between them.
const VIRIDIS = ["440154", "481a6c", "472f7d", "414487", "39568c", "31688e", "2a788e", "23888e", "1f988b", "22a884", "35b779", "54c568", "7ad151", "a5db36", "d2e21b", "fde725"]
  .map((colour) => [0, 2, 4].map((at) => parseInt(colour.slice(at, at + 2), 16)));
function viridis(share) {
  const at = Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1), i = Math.min(VIRIDIS.length - 2, Math.floor(at));
  return VIRIDIS[i].map((x, k) => Math.round(x + (VIRIDIS[i + 1][k] - x) * (at - i)));
}

// A map's number of a code: as it was measured; null for what is no number.
function measured(map, code) {
  if (code < first) return null;
  const x = map.low + ((code - first) / (levels - 1)) * map.span;
  return map.log ? 10 ** x : x;
}
const findingOf = (code) => Object.keys(codes).find((name) => codes[name] === code) || "";
const ends = (map) => [map.low, map.low + map.span].map((x) => (map.log ? 10 ** x : x));
const short = (x) => (x === null ? "" : x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e5) ? x.toExponential(1).replace("e+", "e") : String(+x.toPrecision(3)));

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const x of list) if (x !== null) { if (x < low) low = x; if (x > high) high = x; }
  return [low, high];
}
