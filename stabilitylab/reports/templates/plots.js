"use strict";
const plots = JSON.parse(document.getElementById("plots").textContent);
const root = document.documentElement;
const flat = { "exactly 0": "#ffffff", "no gradient": "#bdbdbd", "not finite": "#d7191c", "diverged": "#d7191c", "stuck": "#bdbdbd" };
const codes = { "exactly 0": 1, "no gradient": 2, "not finite": 3, "diverged": 4, "stuck": 5 }, first = 6, levels = 16384;
const hidden = new Map();   // figure -> the keys that are switched off
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const escaped = (text) => text.replace(/[&<>]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[letter]);
const plotOf = (place) => plots[place.closest("figure").id][+place.dataset.place];

// Dark colours are too faint on a dark page: they are mixed with white there.
function visible(colour) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const light = (0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]) / 255;
  if (root.dataset.theme !== "dark" || light > 0.4) return colour;
  const white = Math.min(0.85, (0.45 - light) * 2);
  return "#" + parts.map((x) => Math.round(x + (255 - x) * white).toString(16).padStart(2, "0")).join("");
}

// Axis titles break into lines of about so many letters.
function wrapped(text, letters) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= letters) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.map(escaped).join("<br>");
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const x of list) if (x !== null) { if (x < low) low = x; if (x > high) high = x; }
  return [low, high];
}

function axis(spec, log, values, letters) {
  const found = {
    title: { text: wrapped(spec.title, letters), standoff: 6, font: { size: 12 } }, type: log ? "log" : "linear", gridcolor: css("--grid"),
    zeroline: false, linecolor: css("--line"), automargin: true, exponentformat: "power", tickfont: { size: 11 }, tickmode: "auto",
  };
  if (spec.ticks && spec.ticks.length) {
    return { ...found, tickmode: "array", tickvals: spec.ticks, ticktext: spec.names ? spec.names.map(escaped) : spec.ticks.map(String), minor: { ticks: "" } };
  }
  if (log) {
    const [low, high] = extent(values.map((list) => list.filter((x) => x > 0))), decades = Math.log10(high / low);
    if (decades > 0.9) Object.assign(found, { tickmode: "linear", tick0: 0, dtick: decades > 2.5 ? Math.ceil(decades / 8) : "D2" });
  } else if (values.every((list) => list.every((x) => x === null || Number.isInteger(x)))) {
    const [low, high] = extent(values);
    if (high - low <= 10) Object.assign(found, { tickmode: "linear", tick0: 0, dtick: 1 });
  }
  return found;
}

function lines(plot, off, log) {
  const traces = [], levels = plot.traces.filter((one) => !one.right).flatMap((one) => [...one.y, ...(one.low || [])]);
  const floor = log ? extent([levels.filter((level) => level > 0)])[0] : -Infinity; // a band that reaches 0 ends there
  for (const one of plot.traces) {
    const colour = visible(one.colour), ends = one.low ? one.low.map((low, i) => [low, one.high[i]]) : null;
    const base = { type: "scatter", x: one.x, yaxis: one.right ? "y2" : "y", visible: !off.has(one.key), showlegend: false, name: one.name };
    const area = ends && one.kind === "line" && one.x.length > 1;
    if (area) {
      // An end that is not a number ends the area: it is cut into stretches.
      for (let from = 0; from < one.x.length; from++) {
        let to = from;
        while (to < one.x.length && ends[to].every((end) => end !== null)) to++;
        if (to - from > 1) {
          const x = one.x.slice(from, to), low = one.low.slice(from, to).map((end) => (one.right ? end : Math.max(end, floor)));
          traces.push({ ...base, x: [...x, ...x.toReversed()], y: [...one.high.slice(from, to), ...low.toReversed()],
            fill: "toself", fillcolor: colour + "2b", line: { width: 0 }, mode: "lines", hoverinfo: "skip" });
        }
        from = to;
      }
    }
    const symbol = one.kind === "crosses" ? "x-thin" : one.symbol + (one.filled ? "" : "-open");
    const trace = { ...base, y: one.y, connectgaps: false,
      mode: one.kind !== "line" ? "markers" : one.marked ? "lines+markers" : "lines",
      line: { color: colour, width: 1.8, dash: one.dash },
      marker: { color: colour, symbol, size: one.kind === "crosses" ? 9 : 6, maxdisplayed: one.kind === "line" ? 14 : 0,
        line: { color: colour, width: one.kind === "crosses" ? 2 : 1.2 } },
      hovertemplate: `<b>${escaped(one.name)}</b><br>${escaped(plot.x.title)} %{x}: %{y:.4g}` };
    if (ends) {
      Object.assign(trace, { customdata: ends });
      trace.hovertemplate += `<br>%{customdata[0]:.3g} to %{customdata[1]:.3g} over ${one.seeds} seeds`;
      if (!area) {
        trace.error_y = { type: "data", symmetric: false, array: ends.map(([, high], i) => high - one.y[i]),
          arrayminus: ends.map(([low], i) => one.y[i] - low), color: colour, width: 3, thickness: 1 };
      }
    }
    trace.hovertemplate += "<extra></extra>";
    traces.push(trace);
  }
  for (const line of plot.references.filter((each) => each.value !== null)) { // so that the axis reaches the line
    const [low] = extent([plot.map ? plot.map.x : plot.traces.flatMap((one) => one.x)]);
    const [bottom] = extent(plot.map ? [plot.map.y] : plot.traces.filter((one) => !one.right).map((one) => one.y));
    if (Number.isFinite(low) && Number.isFinite(bottom)) {
      traces.push({ type: "scatter", mode: "markers", marker: { opacity: 0 }, hoverinfo: "skip", showlegend: false,
        x: [line.vertical ? line.value : low], y: [line.vertical ? bottom : line.value] });
    }
  }
  return traces;
}

// Differences modulo 2^16, low bytes before high bytes, deflated: back to codes, once.
async function unpacked(map) {
  if (!map.codes) {
    const bytes = Uint8Array.from(atob(map.cells), (letter) => letter.charCodeAt(0));
    const stream = new DecompressionStream("deflate"), writer = stream.writable.getWriter();
    writer.write(bytes);
    writer.close();
    const planes = new Uint8Array(await new Response(stream.readable).arrayBuffer()), count = planes.length / 2;
    map.codes = new Uint16Array(count);
    for (let i = 0, sum = 0; i < count; i++) map.codes[i] = sum = (sum + planes[i] + 256 * planes[count + i]) & 65535;
    delete map.cells;
  }
  return map.codes;
}

// Ticks of a colour bar whose numbers are logarithms: powers of ten, or round numbers where there are few.
function powers(low, high) {
  const span = high - low, found = [];
  if (span >= 2) {
    const step = Math.ceil(span / 6);
    for (let k = Math.ceil(low); k <= high; k += step) found.push([k, `10<sup>${k}</sup>`]);
  } else {
    for (let k = Math.floor(low); k <= high; k++) for (const digit of [1, 2, 5]) found.push([k + Math.log10(digit), digit * 10 ** k]);
  }
  let shown = found.filter(([at]) => at >= low && at <= high);
  if (shown.length < 2) shown = [0, 1, 2, 3].map((i) => [low + (span * i) / 3, 10 ** (low + (span * i) / 3)]);
  return { tickmode: "array", tickvals: shown.map(([at]) => at), ticktext: shown.map(([, text]) => (typeof text === "number" ? String(+text.toPrecision(3)) : text)) };
}

function heat(plot, cells, log) {
  const map = plot.map, width = map.x.length;
  const grid = (value) => map.y.map((_, i) => Array.from(cells.subarray(i * width, (i + 1) * width), value));
  const number = (code) => (code < first ? null : map.low + ((code - first) / (levels - 1)) * map.span);
  const value = (code) => { const x = number(code); return x === null || !map.log ? x : 10 ** x; };
  const shown = (x) => (map.log === log ? x : log ? Math.log10(x) : 10 ** x);
  const shade = (code) => (code < first ? null : shown(number(code)));
  const ends = { zmin: shown(map.low), zmax: shown(map.low + map.span) }; // not those of its cells: maps may share them
  const bar = { title: { text: escaped(map.unit), side: "right", font: { size: 11 } }, thickness: 10, tickfont: { size: 10 }, outlinewidth: 0, exponentformat: "power" };
  if (log) Object.assign(bar, map.log ? powers(map.low, map.low + map.span) : powers(Math.log10(map.low), Math.log10(map.low + map.span)));
  const place = `${escaped(plot.x.title)} %{x}, ${escaped(plot.y.title)} %{y}: `;
  const printed = (has) => map.text && { texttemplate: "%{text}", textfont: { size: 10.5 }, // a trace prints on its cells alone
    text: map.text.map((row, i) => row.map((text, j) => (has(cells[i * width + j]) ? escaped(text).replaceAll("\n", "<br>") : ""))) };
  const base = { type: "heatmap", x: map.x, y: map.y, hoverongaps: false };
  const traces = [{ ...base, ...printed((code) => code >= first), z: grid(shade), customdata: grid(value), ...ends, colorscale: "Viridis", colorbar: bar,
    hovertemplate: `${place}<b>%{customdata:.3~g}</b> ${escaped(map.unit)}<extra></extra>` }];
  for (const finding of map.findings) {
    const own = (code) => code === codes[finding];
    traces.push({ ...base, ...printed(own), z: grid((code) => (own(code) ? 1 : null)), showscale: false,
      colorscale: [[0, flat[finding]], [1, flat[finding]]], hovertemplate: `${place}<b>${finding}</b><extra></extra>` });
  }
  return traces;
}

function marks(plot, log) {
  const shapes = [], annotations = [];
  for (const { value, label, vertical } of plot.references) {
    if (value === null || (!vertical && log && value <= 0)) continue;
    const line = { color: css("--soft"), width: 1, dash: "dash" };
    const at = (value, log) => (log ? Math.log10(value) : value); // where annotations stand on a logarithmic axis
    shapes.push(vertical ? { type: "line", x0: value, x1: value, yref: "paper", y0: 0, y1: 1, line }
      : { type: "line", y0: value, y1: value, xref: "paper", x0: 0, x1: 1, line });
    annotations.push({ text: escaped(label), showarrow: false, font: { size: 10.5, color: css("--soft") },
      ...(vertical ? { x: at(value, plot.x.log), yref: "paper", y: 1, xanchor: "left", yanchor: "top", textangle: 0 }
        : { xref: "paper", x: 1, y: at(value, log), xanchor: "right", yanchor: "bottom" }) });
  }
  return { shapes, annotations };
}

async function draw(place) {
  const plot = plotOf(place), figure = place.closest("figure"), map = plot.map;
  if (plot.y.names) place.style.height = `${Math.max(300, 80 + 22 * plot.y.names.length)}px`;
  const button = figure.querySelector(`.scale[data-place="${place.dataset.place}"]`);
  const log = button ? button.getAttribute("aria-pressed") === "true" : map ? map.log : plot.y.log;
  try {
    const own = (right) => plot.traces.filter((one) => one.right === right).flatMap((one) => [one.y, one.low || [], one.high || []]);
    const letters = Math.max(24, Math.floor(place.clientHeight / 7.5));
    const layout = {
      margin: { l: 50, r: plot.right ? 50 : 10, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: map ? css("--field") : "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: css("--ink") }, showlegend: false, hovermode: "closest",
      hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--soft"), font: { color: css("--ink"), size: 12 }, align: "left" },
      xaxis: axis(plot.x, plot.x.log, map ? [map.x] : plot.traces.map((one) => one.x), 60),
      yaxis: axis(plot.y, !map && log, map ? [map.y] : own(false), letters), ...marks(plot, !map && log),
    };
    if (map) for (const each of [layout.xaxis, layout.yaxis]) each.showgrid = false;
    if (plot.y.names) layout.yaxis.autorange = "reversed"; // the first row of a table stands on top
    if (plot.right) layout.yaxis2 = { ...axis(plot.right, plot.right.log, own(true), letters), overlaying: "y", side: "right", showgrid: false };
    const data = map ? heat(plot, map.codes || (await unpacked(map)), log) : lines(plot, hidden.get(figure) || new Set(), log);
    await Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
    if (map && map.findings.length && !place.dataset.drawn) place.after(legend(map));
    if (!place.dataset.drawn) {
      // Ticks are set for the whole range: in a part of it plotly chooses them, until all is seen again.
      place.on("plotly_relayout", (change) => {
        if ("yaxis.range[0]" in change) Plotly.relayout(place, { "yaxis.tickmode": "auto", "yaxis.dtick": null });
        else if (change["yaxis.autorange"]) draw(place);
      });
    }
    place.dataset.drawn = "true";
  } catch (error) {
    place.classList.add("failed");
    place.textContent = "This plot could not be drawn here; its PDF and CSV stand below.";
    console.error(error);
  }
}

function legend(map) {
  const box = document.createElement("p");
  box.className = "legend";
  for (const finding of map.findings) {
    const entry = document.createElement("span"), patch = document.createElement("i");
    patch.style.background = flat[finding];
    entry.append(patch, finding);
    box.append(entry);
  }
  return box;
}

function redraw(inside = document) {
  return Promise.all(all(".plot[data-drawn]", inside).map(draw));
}
