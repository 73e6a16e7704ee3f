"use strict";
const plots = JSON.parse(document.getElementById("plots").textContent);
const root = document.documentElement;
const special = { "exactly 0": "#ffffff", "no gradient": "#bdbdbd", "not finite": "#d7191c" };
const hidden = {};   // figure -> set of keys that are switched off
const switched = {}; // figure -> are logarithmic axes linear, and linear ones logarithmic?
const drawn = new Set();
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

function axis(spec, flip, map) {
  const log = !map && (flip ? !spec.log : spec.log);
  const found = {
    title: { text: spec.title, standoff: 6 }, type: log ? "log" : "linear", gridcolor: css("--grid"), zeroline: false,
    linecolor: css("--line"), automargin: true, exponentformat: "power", tickfont: { size: 11 },
  };
  if (spec.ticks && spec.ticks.length) Object.assign(found, { tickvals: spec.ticks, ticktext: spec.ticks.map(String) });
  return found;
}

function lines(plot, off) {
  return plot.traces.map((trace) => {
    const visible = !off.has(trace.key);
    if (trace.band) {
      return { ...trace, visible, fill: "toself", fillcolor: trace.band + "2b", line: { width: 0 }, mode: "lines",
        hoverinfo: "skip", showlegend: false, type: "scatter" };
    }
    const seeds = trace.seeds > 1 ? `<br>mean of ${trace.seeds} seeds` : "";
    return { ...trace, visible, type: "scatter", showlegend: false, connectgaps: false,
      hovertemplate: `${escape(trace.name)}<br>${escape(plot.x.title)} %{x}<br>%{y:.4g}${seeds}<extra></extra>` };
  });
}

function escape(text) {
  return text.replace(/[&<>]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[letter]);
}

// 16-bit steps between the lowest and the highest number; 65535 is a cell without one.
function cells(map) {
  const bytes = Uint8Array.from(atob(map.cells), (letter) => letter.charCodeAt(0));
  const steps = new Uint16Array(bytes.buffer);
  const width = map.x.length;
  return Array.from({ length: map.rows }, (_, i) =>
    Array.from(steps.subarray(i * width, (i + 1) * width), (step) => (step === 65535 ? null : map.low + (step / 65534) * map.span)));
}

function heat(plot, flip) {
  const map = plot.map, z = cells(map), log = map.log !== (flip && (map.log || map.low > 0));
  const value = (x) => (x === null ? null : map.log ? 10 ** x : x);
  const shade = (x) => (x === null ? null : log ? Math.log10(value(x)) : value(x));
  const bar = { title: { text: map.unit, side: "right", font: { size: 11 } }, thickness: 10, tickfont: { size: 10 }, outlinewidth: 0 };
  if (log) Object.assign(bar, { tickprefix: "10<sup>", ticksuffix: "</sup>" });
  const name = (kind) => `${escape(plot.x.title)} %{x}, ${escape(plot.y.title)} %{y}<br>${kind}<extra></extra>`;
  const traces = [{ type: "heatmap", x: map.x, y: map.y, z: z.map((row) => row.map(shade)), customdata: z.map((row) => row.map(value)),
    colorscale: "Viridis", colorbar: bar, hoverongaps: false, hovertemplate: name("%{customdata:.4g}") }];
  for (const [kind, places] of Object.entries(map.special)) {
    const flat = Array.from({ length: map.rows }, () => new Array(map.x.length).fill(null));
    for (const [i, j] of places) flat[i][j] = 1;
    traces.push({ type: "heatmap", x: map.x, y: map.y, z: flat, showscale: false, hoverongaps: false,
      colorscale: [[0, special[kind]], [1, special[kind]]], hovertemplate: name(kind) });
  }
  return traces;
}

function marks(plot, off) {
  const shapes = [], notes = [];
  for (const { value, label, vertical } of plot.references) {
    const line = { color: css("--soft"), width: 1, dash: "dash" };
    shapes.push(vertical ? { type: "line", x0: value, x1: value, yref: "paper", y0: 0, y1: 1, line }
      : { type: "line", y0: value, y1: value, xref: "paper", x0: 0, x1: 1, line });
    const log = !vertical && axis(plot.y, off).type === "log";
    notes.push({ text: escape(label), showarrow: false, font: { size: 10, color: css("--soft") },
      ...(vertical ? { x: value, yref: "paper", y: 1, xanchor: "left", yanchor: "top" }
        : { xref: "paper", x: 1, y: log ? Math.log10(value) : value, xanchor: "right", yanchor: "bottom" }) });
  }
  return { shapes, annotations: notes };
}

function draw(place) {
  const figure = place.closest("figure").id, plot = plots[figure][+place.dataset.place];
  const flip = switched[figure] || false, off = hidden[figure] || new Set();
  const layout = {
    margin: { l: 54, r: plot.right ? 54 : 12, t: 10, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: css("--ink") }, showlegend: false, hovermode: "closest",
    xaxis: axis(plot.x, false, plot.map), yaxis: axis(plot.y, flip, plot.map), ...marks(plot, flip),
  };
  if (plot.right) layout.yaxis2 = { ...axis(plot.right, flip), overlaying: "y", side: "right", showgrid: false };
  const data = plot.map ? heat(plot, flip) : lines(plot, off);
  Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
  if (!drawn.has(place) && plot.map) legend(place, plot.map);
  drawn.add(place);
}

function legend(place, map) {
  const kinds = Object.keys(map.special);
  if (!kinds.length) return;
  const box = document.createElement("div");
  box.className = "legend";
  for (const kind of kinds) {
    const entry = document.createElement("span"), patch = document.createElement("i");
    patch.style.background = special[kind];
    entry.append(patch, kind);
    box.append(entry);
  }
  place.after(box);
}

function redraw(figure) {
  all(".plot", figure).filter((place) => drawn.has(place)).forEach(draw);
}

function show(figure, key, on) {
  const off = (hidden[figure.id] ||= new Set());
  if (on) off.delete(key); else off.add(key);
  all(".toggle", figure).filter((b) => b.dataset.key === key).forEach((b) => b.setAttribute("aria-pressed", String(on)));
  redraw(figure);
}

const figures = all("figure.section");
for (const figure of figures) {
  for (const button of all(".toggle", figure)) {
    button.addEventListener("click", () => show(figure, button.dataset.key, button.getAttribute("aria-pressed") === "false"));
  }
  const scale = figure.querySelector(".scale");
  scale.addEventListener("click", () => {
    switched[figure.id] = !switched[figure.id];
    scale.setAttribute("aria-pressed", String(switched[figure.id]));
    redraw(figure);
  });
}

// Toggles that act on all figures: the series that stand in two of them or more.
const everywhere = document.getElementById("everywhere"), seen = new Map();
for (const button of all("#figures .section .toggle")) {
  const key = button.dataset.key;
  seen.set(key, [...(seen.get(key) || []), button]);
}
for (const [key, buttons] of seen) {
  if (buttons.length < 2) continue;
  const copy = buttons[0].cloneNode(true);
  copy.addEventListener("click", () => {
    const on = copy.getAttribute("aria-pressed") === "false";
    copy.setAttribute("aria-pressed", String(on));
    buttons.forEach((button) => show(button.closest("figure"), key, on));
  });
  everywhere.append(copy);
}

// Ledger: a row is shown where both of its filters are on and the words are in it.
const rows = all("#ledger tbody tr"), search = document.getElementById("search"), found = document.getElementById("found");
function filter() {
  const on = Object.fromEntries(all(".filter").map((group) => [group.dataset.filter,
    new Set(all(".toggle", group).filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.value))]));
  const words = search.value.toLowerCase();
  for (const row of rows) {
    row.hidden = !(on.verdict.has(row.dataset.verdict) && on.paper.has(row.dataset.paper) && row.textContent.toLowerCase().includes(words));
  }
  found.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
}
for (const button of all(".filter .toggle")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") === "false"));
    filter();
  });
}
search.addEventListener("input", filter);
filter();

// Table of runs: a click on a heading sorts, numbers as numbers.
const table = document.querySelector("#table tbody");
all("#table .sort").forEach((button, column) => button.addEventListener("click", () => {
  const heading = button.parentElement, down = heading.getAttribute("aria-sort") === "ascending";
  all("#table th[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.children[column].dataset.sort || row.children[column].textContent;
  all("tr", table).sort((a, b) => value(a).localeCompare(value(b), "en", { numeric: true }) * (down ? -1 : 1))
    .forEach((row) => table.append(row));
}));

// Dark or light: as the system has it, until the button says otherwise.
const theme = document.getElementById("theme");
function paint(dark) {
  root.dataset.theme = dark ? "dark" : "light";
  theme.setAttribute("aria-pressed", String(dark));
  drawn.forEach(draw);
}
theme.addEventListener("click", () => paint(root.dataset.theme !== "dark"));
paint(matchMedia("(prefers-color-scheme: dark)").matches);

// A plot is drawn when it comes near the window, and all of them before printing.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }
}, { rootMargin: "400px" });
all(".plot").forEach((place) => watcher.observe(place));
addEventListener("beforeprint", () => all(".plot").filter((place) => !drawn.has(place)).forEach(draw));
