"use strict";
const hidden = new Map();   // figure -> the keys that are switched off
const plotOf = (place) => plots[place.dataset.figure || place.closest("figure").id][+place.dataset.place];

// The part of a plot that is enlarged: kept when it is drawn again, and when the page comes again.
const zooms = new Map(Object.entries((history.state && history.state.zooms) || {}));
const zoomOf = (place) => `${place.dataset.figure || place.closest("figure").id}|${place.dataset.place}`;
function keepZoom(place) {
  const { xaxis, yaxis } = place._fullLayout, ends = {};
  for (const [name, one] of Object.entries({ xaxis, yaxis })) if (!one.autorange && place.dataset.own !== "two") ends[name] = { type: one.type, range: [...one.range] };
  zooms.set(zoomOf(place), ends);
}
function zoomed(place, layout) {
  for (const [name, { type, range }] of Object.entries(zooms.get(zoomOf(place)) || {})) {
    if ((layout[name].type || "linear") === type) Object.assign(layout[name], { range, autorange: false, tickmode: "auto", dtick: null });
  }
}

async function draw(place) {
  if (!window.Plotly) await library;
  const plot = plotOf(place), figure = place.closest("figure"), map = plot.map;
  if (plot.y.names) place.style.height = `${Math.max(300, 80 + 22 * plot.y.names.length)}px`;
  const button = place.closest(".panel").querySelector(".scale");
  const across = place.closest(".panel").querySelector(".logx"), x = across ? { ...plot.x, log: pressed(across) } : plot.x;
  const log = button ? button.getAttribute("aria-pressed") === "true" : map ? map.log : plot.y.log;
  try {
    const own = (right) => plot.traces.filter((one) => one.right === right && (!plot.runs || plot.pair || isShown(one.name))).flatMap((one) => [one.y, one.low || [], one.high || []]);
    const letters = Math.max(24, Math.floor(place.clientHeight / 7.5));
    const layout = {
      margin: { l: 50, r: plot.right ? 50 : 10, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: map ? css("--field") : "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: css("--ink") }, showlegend: false, hovermode: "closest",
      hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--soft"), font: { color: css("--ink"), size: 12 }, align: "left" },
      xaxis: axis(x, x.log, map ? [map.x] : plot.traces.map((one) => one.x), 60),
      yaxis: axis(plot.y, !map && log, map ? [map.y] : own(false), letters), ...marks({ ...plot, x }, !map && log),
    };
    if (map) for (const each of [layout.xaxis, layout.yaxis]) each.showgrid = false;
    if (map && map.square) Object.assign(layout.yaxis, { scaleanchor: "x", constrain: "domain" }), (layout.xaxis.constrain = "domain");
    if (plot.y.names) layout.yaxis.autorange = "reversed"; // the first row of a table stands on top
    if (plot.right) layout.yaxis2 = { ...axis(plot.right, plot.right.log, own(true), letters), overlaying: "y", side: "right", showgrid: false };
    const data = map ? (map.ratio ? ratios(plot) : heat(plot, map.codes || (await unpacked(map)), log)) : lines(plot, hidden.get(figure) || new Set(), log);
    zoomed(place, layout);
    const drawing = Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
    fit(place); // before anything is waited for: a sheet is printed as it is then
    await drawing;
    all(".hm", place).forEach((cells, trace) => cells.classList.toggle("striped", data[trace].name === "not finite"));
    if (map && map.findings.length && !place.dataset.drawn) place.after(legend(map));
    if (!place.dataset.drawn) {
      // Ticks are set for the whole range: in a part of it plotly chooses them, until all is seen again.
      place.on("plotly_relayout", (change) => {
        if ("yaxis.range[0]" in change) Plotly.relayout(place, { "yaxis.tickmode": "auto", "yaxis.dtick": null });
        if (Object.keys(change).some((name) => /axis\.(range|autorange)/.test(name))) keepZoom(place);
        if (change["yaxis.autorange"]) draw(place);
        else markPlot(place);
      });
      pointable(place);
    }
    place.dataset.drawn = "true";
    markPlot(place);
  } catch (error) {
    place.classList.add("failed");
    place.textContent = "This plot could not be drawn here; its PDF and CSV stand below.";
    console.error(error);
  }
}

// Plotly keeps the size that a plot was first drawn with; its place is another one on paper.
function fit(place) {
  const { width, height } = place._fullLayout;
  if (Math.abs(width - place.clientWidth) > 1 || Math.abs(height - place.clientHeight) > 1) Plotly.relayout(place, { autosize: true });
}

function legend(map) {
  return made("p", { className: "legend" }, ...map.findings.map((name) => made("span", {}, patchOf(lookOfFinding(name)), name)));
}

function redraw(inside = document) {
  return Promise.all(all(".plot[data-drawn]", inside).map(draw));
}
