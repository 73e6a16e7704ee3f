"use strict";
// Axis titles break into lines of about so many letters.
function wrapped(text, letters) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= letters) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.map(escaped).join("<br>");
}

function axis(spec, log, values, letters) {
  const found = {
    title: { text: wrapped(spec.title, letters), standoff: 6, font: { size: 12 } }, type: log ? "log" : "linear", gridcolor: css("--grid"),
    zeroline: false, linecolor: css("--line"), automargin: true, exponentformat: narrow() ? "e" : "power", tickfont: { size: 12 }, tickmode: "auto",
  };
  if (spec.limits && (!log || spec.limits[0] > 0)) found.range = log ? spec.limits.map(Math.log10) : spec.limits; // panels share it
  if (spec.ticks && spec.ticks.length) {
    return { ...found, tickmode: "array", tickvals: spec.ticks, ticktext: spec.names ? spec.names.map(escaped) : spec.ticks.map(String), minor: { ticks: "" } };
  }
  if (log) {
    const [low, high] = extent(values.map((list) => list.filter((x) => x > 0))), decades = Math.log10(high / low);
    if (decades > (narrow() ? 1.3 : 0.9)) Object.assign(found, { tickmode: "linear", tick0: 0, dtick: decades > 2.5 ? Math.ceil(decades / (narrow() ? 5 : 8)) : narrow() ? 1 : "D2" });
    // Between powers of ten plotly writes the digit alone, "5" for 0.5 too.
    if (typeof found.dtick !== "number") found.tickformat = low >= 1e-3 && high < 1e5 ? "~g" : ".0e";
  } else if (values.every((list) => list.every((x) => x === null || Number.isInteger(x)))) {
    const [low, high] = extent(values);
    if (high - low <= 10) Object.assign(found, { tickmode: "linear", tick0: 0, dtick: 1 });
  }
  return found;
}

// Ticks of a colour bar whose numbers are logarithms: powers of ten, or round numbers where there are few.
function powers(low, high) {
  const span = high - low, found = [];
  if (span >= 2) {
    const step = Math.ceil(span / 6);
    for (let k = Math.ceil(low); k <= high; k += step) found.push([k, narrow() ? `1e${k}` : `10<sup>${k}</sup>`]);
  } else {
    for (let k = Math.floor(low); k <= high; k++) for (const digit of [1, 2, 5]) found.push([k + Math.log10(digit), digit * 10 ** k]);
  }
  let shown = found.filter(([at]) => at >= low && at <= high);
  if (shown.length < 2) shown = [0, 1, 2, 3].map((i) => [low + (span * i) / 3, 10 ** (low + (span * i) / 3)]);
  return { tickmode: "array", tickvals: shown.map(([at]) => at), ticktext: shown.map(([, text]) => (typeof text === "number" ? String(+text.toPrecision(3)) : text)) };
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
