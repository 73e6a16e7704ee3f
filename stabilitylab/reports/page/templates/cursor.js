"use strict";
// One cursor for all plots: where a step or a layer is pointed at, each plot that has it on an axis shows a line there.
const stepped = (plot) => ["update", "step"].includes(plot.x.title);
const layerOn = (plot, stack) => /(^|\s)layer$/.test(plot.x.title) && (!stack || !/encoder|decoder/.test(plot.x.title) || plot.x.title.includes(stack));
const pixel = (axis, value) => {
  const found = axis.d2p(value);
  return Number.isFinite(found) && found >= 0 && found <= axis._length ? axis._offset + found : null;
};

function markPlot(place) {
  const plot = plotOf(place), layout = place._fullLayout, origin = plot.map && plot.map.origin, now = cursor();
  if (!layout || !layout.xaxis || !place.offsetParent) return;
  const column = stepped(plot) ? now.step : layerOn(plot, now.stack) ? now.layer : null;
  const row = origin && now.layer && (origin.stack === now.stack || now.stack === null) ? origin.layers.indexOf(now.layer) : -1;
  const x = column === null ? null : pixel(layout.xaxis, column), y = row < 0 ? null : pixel(layout.yaxis, plot.map.y[row]);
  const [vertical, horizontal] = all(":scope > .cursor", place);
  vertical.hidden = x === null;
  if (x !== null) Object.assign(vertical.style, { left: `${x}px`, top: `${layout.yaxis._offset}px`, height: `${layout.yaxis._length}px` });
  horizontal.hidden = y === null;
  if (y !== null) Object.assign(horizontal.style, { top: `${y}px`, left: `${layout.xaxis._offset}px`, width: `${layout.xaxis._length}px` });
}
function markPlots() {
  all(".plot[data-drawn]").forEach(markPlot);
}

function pointable(place) {
  place.append(made("span", { className: "cursor upright", hidden: true }), made("span", { className: "cursor level", hidden: true }));
  const found = ({ points: [one] }) => {
    const plot = plotOf(place), origin = plot.map && plot.map.origin, now = cursor();
    const step = stepped(plot) ? one.x : now.step;
    if (origin) return { step, layer: origin.layers[plot.map.y.indexOf(one.y)] || null, stack: origin.stack };
    return layerOn(plot, "") ? { ...now, layer: one.x } : { ...now, step };
  };
  place.on("plotly_hover", (event) => point(found(event)));
  place.on("plotly_unhover", () => point(null));
  place.on("plotly_click", (event) => look(found(event)));
  place.addEventListener("keydown", (event) => {
    const origin = plotOf(place).map && plotOf(place).map.origin;
    if (event.target === place && enlarge(event, place)) return;
    if (event.target === place) keys(event, origin ? origin.stack : view.stack, origin ? Math.max(...origin.layers) : 0);
  });
}
// With the keyboard: + and - enlarge and shrink the x axis around the cursor, 0 shows all again.
function enlarge(event, place) {
  const factor = { "+": 0.5, "=": 0.5, "-": 2, 0: 0 }[event.key];
  if (factor === undefined || event.ctrlKey || event.metaKey) return false;
  event.preventDefault();
  if (!factor) { Plotly.relayout(place, { "xaxis.autorange": true, "yaxis.autorange": true }); return true; }
  const axis = place._fullLayout.xaxis, [low, high] = axis.range, plot = plotOf(place), step = stepped(plot) ? cursor().step : null;
  const wanted = step === null ? NaN : axis.type === "log" ? Math.log10(step) : step;
  const middle = wanted >= low && wanted <= high ? wanted : (low + high) / 2;
  Plotly.relayout(place, { "xaxis.range[0]": middle - (middle - low) * factor, "xaxis.range[1]": middle + (high - middle) * factor });
  return true;
}
pointing.push(markPlots);
listeners.push(markPlots);
