"use strict";
// The maps of the chosen probe: a row a stack, a column a run.
function panelOf(title, figure, place, label) {
  const plot = made("div", { className: "plot", tabIndex: 0 });
  Object.assign(plot.dataset, { figure, place });
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", label);
  return made("div", { className: "panel" }, made("div", { className: "head" }, made("h4", {}, title)), plot);
}

function buildMaps() {
  const place = byId("map-panels"), shown = shownRuns().filter((run) => mapsOf(run).length);
  place.style.setProperty("--columns", Math.min(3, shown.length));
  place.replaceChildren(...stacks().flatMap((stack) => shown.flatMap((run) => mapsOf(run).filter((one) => one.stack === stack).map((one) => {
    const title = `${run.title}${stack ? `, ${stack}` : ""}`, probe = view.probe.replaceAll("_", " ");
    return panelOf(title, run.figure, one.place, `Map of ${probe} of ${title}: layers by steps, n = 1`);
  }))));
  all(".plot", place).forEach((each) => watcher.observe(each));
}

if (byId("map-panels")) {
  listeners.push((changes) => {
    if ("probe" in changes || "runs" in changes || "group" in changes) buildMaps();
    if ("own" in changes) all(".plot[data-drawn]").filter((place) => plotOf(place).map && plotOf(place).map.origin).forEach(draw);
  });
}
listeners.push((changes) => {
  if (["run", "runs", "group", "smooth"].some((key) => key in changes)) all("#curves .plot[data-drawn]").forEach(draw);
});
