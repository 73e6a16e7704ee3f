"use strict";
const LEAST_SEEDS = 3; // of a point that is drawn full
const AROUND = [[0, "#2166ac"], [0.5, "#f7f7f7"], [1, "#b2182b"]]; // below and above a middle
const SIGNS = { note: ["circle-open", 9, "--soft"], warning: ["triangle-up", 11, "--inconclusive"], failure: ["x", 12, "--lost"], "not finite": ["x", 13, "--lost"] };

// A line smoothed over a share of its axis: the mean of what is drawn around each point (of logarithms on such an axis).
// What is not finite stays a gap, and nothing is averaged over it.
function smoothed(one, share, log) {
  const { x, y } = one, half = ((x.at(-1) - x[0]) * share) / 200, out = [];
  if (!share || x.length < 3) return y;
  const usable = (value) => value !== null && (!log || value > 0);
  for (let i = 0; i < x.length; i++) {
    if (!usable(y[i])) { out.push(y[i]); continue; }
    let sum = 0, count = 0;
    for (const way of [-1, 1]) {
      for (let k = way < 0 ? i : i + 1; k >= 0 && k < x.length && usable(y[k]) && Math.abs(x[k] - x[i]) <= half; k += way) {
        sum += log ? Math.log(y[k]) : y[k];
        count++;
      }
    }
    out.push(log ? Math.exp(sum / count) : sum / count);
  }
  return out;
}

// What happened in a run, on its curve: notes first, so that failures are drawn above them, and numbers that are not
// finite last, where the line breaks off.
// Where many runs are shown, these numbers alone (not `every` event).
function happenings(plot, one, y, every) {
  const { x } = one, traces = [], found = every ? (told.events[one.name] || []).map((event) => ({ ...event })) : [];
  for (let i = 0; i < x.length; i++) {
    if (one.y[i] === null && (i === 0 || one.y[i - 1] !== null)) found.push({ step: x[i], severity: "not finite", title: "not finite", evidence: `step ${x[i]}` });
  }
  const known = y.filter((value) => value !== null);
  for (const [severity, [symbol, size, colour]] of Object.entries(SIGNS)) {
    const own = found.filter((event) => event.severity === severity);
    if (!own.length || !known.length) continue;
    const at = own.map((event) => { const place = x.findLastIndex((step, i) => step <= event.step && y[i] !== null); return place < 0 ? known[0] : y[place]; });
    traces.push({ type: "scatter", mode: "markers", x: own.map((event) => event.step), y: at, name: severity, showlegend: false, cliponaxis: false,
      marker: { symbol, size, color: css(colour), line: { width: severity === "note" ? 1.5 : 1, color: severity === "note" ? css(colour) : css("--paper") } },
      text: own.map((event) => wrapped(`${event.title} (${event.severity}). ${event.evidence}`, 60)), meta: "happened",
      hovertemplate: `<b>${escaped(one.name)}</b>, step %{x}<br>%{text}<extra></extra>` });
  }
  return traces;
}

function lines(plot, off, log) {
  const traces = [], above = [], seen = plot.runs && !plot.pair ? plot.traces.filter((one) => isShown(one.name)) : plot.traces;
  const levels = seen.filter((one) => !one.right).flatMap((one) => [...one.y, ...(one.low || [])]);
  const floor = log ? extent([levels.filter((level) => level > 0)])[0] : -Infinity; // a band that reaches 0 ends there
  for (const one of seen) {
    const own = plot.runs && !plot.pair ? lookOf(one.name) : null;
    const colour = visible(own ? own.colour : one.colour), dash = own ? own.dash : one.dash, ends = one.low ? one.low.map((low, i) => [low, one.high[i]]) : null;
    const faint = plot.runs && view.run && one.name !== view.run;
    const base = { type: "scatter", x: one.x, opacity: faint ? 0.2 : one.faint ? 0.4 : 1, yaxis: one.right ? "y2" : "y", visible: !off.has(one.key), showlegend: false, name: one.name };
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
    const counts = Array.isArray(one.seeds) ? one.seeds : one.x.map(() => one.seeds), enough = counts.map((n) => n >= LEAST_SEEDS);
    const symbol = one.kind === "crosses" ? "x-thin" : enough.map((full) => one.symbol + (full ? "" : "-open"));
    const smooth = plot.runs && view.smooth ? smoothed(one, view.smooth, log) : one.y;
    if (smooth !== one.y) traces.push({ ...base, y: one.y, opacity: 0.25, mode: "lines", line: { color: colour, width: 1 }, hoverinfo: "skip" });
    if (plot.runs) above.push(...happenings(plot, one, smooth, seen.length <= 3 || one.name === view.run));
    const trace = { ...base, y: smooth, connectgaps: false,
      mode: one.kind !== "line" ? "markers" : one.marked && !one.faint ? "lines+markers" : "lines",
      line: { color: colour, width: one.faint ? 1 : 1.8, dash },
      // of an open marker this is the colour of its edge
      marker: { color: enough.map((full) => (full && one.kind !== "crosses" ? visible(one.face) : colour)), symbol, size: one.kind === "crosses" ? 9 : 6, maxdisplayed: one.kind === "line" ? 14 : 0,
        line: { color: colour, width: one.kind === "crosses" ? 2 : 1.2 } },
      hovertemplate: `<b>${escaped(one.name)}</b><br>${escaped(plot.x.title)} %{x}: %{y:.4g}` };
    if (!plot.runs) {
      trace.customdata = counts.map((n, i) => [...(ends && ends[i][0] !== null ? [`${short(ends[i][0])} to ${short(ends[i][1])}, `] : [""]), n]);
      trace.hovertemplate += "<br>%{customdata[0]}n = %{customdata[1]}";
    }
    if (ends) {
      if (!area) {
        trace.error_y = { type: "data", symmetric: false, array: ends.map(([, high], i) => (high === null ? 0 : high - one.y[i])),
          arrayminus: ends.map(([low], i) => (low === null ? 0 : one.y[i] - low)), color: colour, width: 3, thickness: 1 };
      }
    }
    trace.hovertemplate += "<extra></extra>";
    traces.push(trace);
  }
  traces.push(...above);
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

function heat(plot, cells, log) {
  const map = plot.map, width = map.x.length;
  const grid = (value) => map.y.map((_, i) => Array.from(cells.subarray(i * width, (i + 1) * width), value));
  const value = (code) => measured(map, code);
  const height = (code) => { const x = value(code); return x === null || !log ? x : Math.log10(x); };
  const scale = map.origin && layered(plot) ? scaleOf(map.origin) : { log: map.log, low: map.low, high: map.low + map.span }; // maps may share it
  const limit = (x) => (scale.log === log ? x : log ? Math.log10(x) : 10 ** x), ends = { zmin: limit(scale.low), zmax: limit(scale.high) };
  if (!Number.isFinite(ends.zmin)) ends.zmin = log ? Math.log10(map.low) : map.low; // what is shared may reach 0
  const diverging = map.centre !== undefined && !log; // as far to both sides as on the farther one
  if (diverging) {
    const reach = Math.max(Math.abs(ends.zmin - map.centre), Math.abs(ends.zmax - map.centre)) || 1;
    Object.assign(ends, { zmin: map.centre - reach, zmax: map.centre + reach });
  }
  const bar = { title: { text: escaped(map.unit), side: "right", font: { size: 11 } }, thickness: 10, tickfont: { size: 11 }, outlinewidth: 0, exponentformat: "power" };
  if (log) Object.assign(bar, powers(ends.zmin, ends.zmax));
  const place = `${escaped(plot.x.title)} %{x}, ${escaped(plot.y.title)} %{y}: `;
  const printed = (has) => map.text && { texttemplate: "%{text}", textfont: { size: 10.5 }, // a trace prints on its cells alone
    text: map.text.map((row, i) => row.map((text, j) => (has(cells[i * width + j]) ? escaped(text).replaceAll("\n", "<br>") : ""))) };
  const base = { type: "heatmap", x: map.x, y: map.y, hoverongaps: false };
  const traces = [{ ...base, ...printed((code) => code >= first), z: grid(height), customdata: grid(value), ...ends, colorscale: diverging ? AROUND : "Viridis", colorbar: bar,
    hovertemplate: `${place}<b>%{customdata:.3~g}</b> ${escaped(map.unit)}<extra></extra>` }];
  for (const finding of map.findings) {
    const own = (code) => code === codes[finding];
    traces.push({ ...base, ...printed(own), name: finding, z: grid((code) => (own(code) ? 1 : null)), showscale: false,
      colorscale: [[0, flat[finding]], [1, flat[finding]]], hovertemplate: `${place}<b>${finding}</b><extra></extra>` });
  }
  return traces;
}

// How many times one run's numbers are another's: white where they are alike, red where A has more, blue where B has.
function ratios(plot) {
  const { x, y, z, unit } = plot.map, most = Math.max(0.01, ...z.flat().map((value) => Math.abs(value ?? 0)));
  const bar = { title: { text: escaped(unit), side: "right", font: { size: 11 } }, thickness: 10, tickfont: { size: 11 }, outlinewidth: 0 };
  return [{ type: "heatmap", x, y, z, zmin: -most, zmax: most, colorscale: AROUND, colorbar: bar, hoverongaps: false,
    customdata: z.map((row) => row.map((value) => (value === null ? null : 10 ** value))),
    hovertemplate: `${escaped(plot.x.title)} %{x}, ${escaped(plot.y.title)} %{y}: A is <b>%{customdata:.3~g}</b> times B<extra></extra>` }];
}
