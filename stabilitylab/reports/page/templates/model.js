"use strict";
// The model as its stack of layers, one column a run, coloured by a probe at one step; and who shares a colour scale.
const layered = (plot) => plot.map && plot.map.origin && plot.map.origin.layers.some((layer) => layer > 0);
const everyRun = told.runs.map((run) => ({ ...run, maps: plots[run.figure].flatMap((plot, place) => (layered(plot) ? [{ ...plot.map.origin, map: plot.map, place }] : [])) }))
  .filter((run) => run.maps.length);
const shownRuns = () => everyRun.filter((run) => isShown(run.name)); // those whose layers are on this page
const probes = [...new Set(everyRun.flatMap((run) => run.maps.map((one) => one.table)))];
if (!probes.includes(view.probe)) view.probe = probes[0] || null;
const mapsOf = (run, probe = view.probe) => run.maps.filter((one) => one.table === probe);
const stacks = (probe = view.probe) => [...new Set(shownRuns().flatMap((run) => mapsOf(run, probe).map((one) => one.stack)))];
const steps = (probe = view.probe) => [...new Set(shownRuns().flatMap((run) => mapsOf(run, probe).flatMap((one) => one.map.x)))].sort((a, b) => a - b);
const at = (known, step) => Math.max(0, step === null ? known.length - 1 : known.findLastIndex((x) => x <= step));
const shownStep = () => { const known = steps(); return known.length ? known[at(known, view.step)] : view.step; };

// The colours of a run's map: of all runs' maps of that probe, or of the run's own where that is asked for.
function scaleOf(origin, run) {
  const mine = (one) => one === run || one.maps.some(({ map }) => map.origin === origin);
  return scaleOver(origin.table, ownScales(origin.table) ? everyRun.filter(mine) : shownRuns());
}
function scaleOver(table, some) {
  const maps = some.flatMap((one) => mapsOf(one, table).map(({ map }) => map)), log = maps.every((map) => map.log);
  const pairs = maps.map(ends).map(([low, high]) => (log ? [Math.log10(low), Math.log10(high)] : [low, high]));
  return { log, low: Math.min(...pairs.map(([low]) => low)), high: Math.max(...pairs.map(([, high]) => high)) };
}
// Each run has its own scale where that was asked for, and where on one for all a run would lie within a third of the
// colours: a run that diverged must not flatten the others.
function ownScales(table) {
  if (view.own !== null) return view.own;
  const some = shownRuns().filter((run) => mapsOf(run, table).length);
  if (some.length < 2) return false;
  const reach = ({ low, high }) => high - low, shared = reach(scaleOver(table, some));
  return some.some((run) => reach(scaleOver(table, [run])) < shared / 3);
}
function shade(x, scale) {
  const value = scale.log ? Math.log10(x) : x;
  return viridis(scale.high > scale.low ? (value - scale.low) / (scale.high - scale.low) : 0.5);
}

const ACROSS = 24; // pixels of a tower's row, for the stripes of what is not finite
// A tower is one stack of one run; a row is a pixel, or ten with a gap where there are few, stretched by the style sheet.
function paintTower(tower) {
  const { one, run, canvas } = tower, map = one.map, rows = map.y.length, width = map.x.length;
  const scale = scaleOf(map.origin, run), column = at(map.x, view.step), fine = rows > 60, tall = fine ? 1 : 10;
  const picture = new ImageData(ACROSS, rows * tall);
  for (let row = 0; row < rows; row++) {
    const code = map.codes[row * width + column], value = measured(map, code);
    const hex = flat[findingOf(code)], rgb = value !== null ? shade(value, scale) : hex ? [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)) : null;
    for (let k = 0; rgb && k < tall; k++) {
      for (let x = 0; x < ACROSS; x++) {
        const seen = findingOf(code) === "not finite" && x % 4 === 3 ? [255, 255, 255] : rgb;
        picture.data.set([...seen, !fine && k === tall - 1 ? 0 : 255], 4 * (((rows - 1 - row) * tall + (tall - 1 - k)) * ACROSS + x));
      }
    }
  }
  canvas.width = ACROSS;
  canvas.height = rows * tall;
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

function said(run, stack, layer) {
  return mapsOf(run).filter((one) => one.stack === stack).flatMap(({ map, layers, names, parts }) => layers.flatMap((each, row) => {
    if (each !== layer) return [];
    const code = map.codes ? map.codes[row * map.x.length + at(map.x, view.step)] : 0, value = measured(map, code);
    return [`${names && names[parts[row]] ? `${names[parts[row]]} ` : ""}${value === null ? findingOf(code) || "not recorded" : short(value)}`];
  })).join(", ");
}

const towers = [];
function markTowers() {
  const { layer, stack } = cursor();
  for (const { one, mark, box, run } of towers) {
    const rows = one.layers.map((each, row) => (each === layer && one.stack === stack ? row : -1)).filter((row) => row >= 0);
    mark.hidden = !rows.length;
    mark.style.bottom = `${(100 * rows[0]) / one.layers.length}%`;
    mark.style.height = `${(100 * rows.length) / one.layers.length}%`;
    if (rows.length) box.setAttribute("aria-valuenow", layer);
    box.setAttribute("aria-valuetext", rows.length ? `layer ${layer}: ${said(run, stack, layer)}` : "no layer chosen");
  }
  const runs = shownRuns(), unit = runs.length && mapsOf(runs[0])[0] ? mapsOf(runs[0])[0].map.unit : "";
  byId("readout").textContent = layer ? `Update ${shownStep()}, ${stack ? `${stack} ` : ""}layer ${layer} [${unit}]: ${runs.map((run) => `${run.title} ${said(run, stack, layer) || "has none"}`).join("; ")}`
    : "Point at a layer, or click to keep it; arrow keys go through layers and steps.";
}

function buildTower(run, one) {
  const canvas = made("canvas"), mark = made("span", { className: "here", hidden: true });
  const box = made("div", { className: "tower", tabIndex: 0 }, canvas, mark), top = Math.max(...one.layers);
  for (const [name, value] of Object.entries({ role: "slider", "aria-orientation": "vertical", "aria-valuemin": 1, "aria-valuemax": top, "aria-valuenow": 1, "aria-label": `Layers of ${run.title}${one.stack ? `, ${one.stack}` : ""}` })) box.setAttribute(name, value);
  const layerAt = (event) => {
    const area = box.getBoundingClientRect(), row = Math.floor((1 - (event.clientY - area.top) / area.height) * one.layers.length);
    return one.layers[Math.min(one.layers.length - 1, Math.max(0, row))];
  };
  box.addEventListener("pointermove", (event) => point({ step: shownStep(), layer: layerAt(event), stack: one.stack }));
  box.addEventListener("pointerleave", () => point(null));
  box.addEventListener("click", (event) => look({ layer: layerAt(event), stack: one.stack }));
  box.addEventListener("keydown", (event) => keys(event, one.stack, top));
  towers.push({ run, one, canvas, mark, box });
  return made("div", { className: "stack" }, box, made("span", { className: "foot" }, `${one.stack || "layers"} 1–${top}`));
}

// Arrow keys, wherever a stack or a map has the focus: up and down through layers, left and right through steps.
function keys(event, stack, top) {
  const move = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!move) return;
  event.preventDefault();
  if (move[0] && top) look({ stack, layer: view.stack === stack && view.layer ? Math.min(top, Math.max(1, view.layer + move[0])) : 1 });
  if (move[1]) stepBy(move[1]);
}
function stepBy(count) {
  const known = steps();
  if (known.length) look({ step: known[Math.min(known.length - 1, Math.max(0, at(known, view.step) + count))] });
}

function bar(scale, unit, found, label) {
  const colours = Array.from({ length: 9 }, (_, i) => `rgb(${viridis(i / 8)})`).join(", "), box = made("div", { className: "scale-bar" });
  const number = (share) => short(scale.log ? 10 ** (scale.low + share * (scale.high - scale.low)) : scale.low + share * (scale.high - scale.low));
  const strip = made("i", { className: "strip" });
  strip.style.background = `linear-gradient(to right, ${colours})`;
  box.append(...(label ? [made("span", { className: "name" }, label)] : []), made("span", {}, number(0)), strip, made("span", {}, `${number(1)} ${unit}${scale.log ? ", logarithmic" : ""}`));
  box.append(...found.map((name) => made("span", {}, patchOf(lookOfFinding(name)), name)));
  return box;
}

function headOf(run) {
  const found = lookOf(run.name), head = made("span", { className: "head-of-run", title: run.name });
  if (found) head.append(patchOf(visible(found.colour)));
  head.append(run.title.replaceAll("L-", "L\u2011"));  // a hyphen at which no line breaks
  return head;
}

let building = 0;
async function buildModel() {
  const place = byId("stacks"), shown = shownRuns().filter((run) => mapsOf(run).length), own = ++building;
  towers.length = 0;
  await Promise.all(shown.flatMap((run) => mapsOf(run).map(({ map }) => unpacked(map))));
  if (own !== building) return; // others were chosen meanwhile
  towers.length = 0;
  const lacking = shownInOrder().filter((name) => !everyRun.some((run) => run.name === name));
  byId("unmapped").hidden = !lacking.length;
  byId("unmapped").textContent = lacking.length ? `The layers of ${lacking.length} of these runs are not on this page. Their command: stabilitylab report ${lacking.slice(0, 2).map((name) => `--run ${quoted(name)}`).join(" ")}` : "";
  place.replaceChildren(...shown.map((run) => made("div", { className: "run" }, headOf(run), made("div", { className: "towers" }, ...mapsOf(run).map((one) => buildTower(run, one))))));
  const known = steps(), slider = byId("step");
  slider.max = Math.max(0, known.length - 1);
  paintModel();
}

function paintModel() {
  towers.forEach(paintTower);
  const known = steps(), slider = byId("step");
  slider.value = at(known, view.step);
  slider.setAttribute("aria-valuetext", `step ${shownStep()}`);
  byId("step-shown").textContent = shownStep() ?? "";
  byId("own").checked = ownScales(view.probe);
  byId("probe").value = view.probe;
  const with_ = shownRuns().filter((run) => mapsOf(run).length), found = (some) => [...new Set(some.flatMap((run) => mapsOf(run).flatMap(({ map }) => map.findings)))];
  byId("scales").replaceChildren(...(ownScales(view.probe) ? with_.map((run) => [[run], run.title]) : [[with_, ""]]).filter(([some]) => some.length)
    .map(([some, label]) => bar(scaleOf(mapsOf(some[0])[0].map.origin, some[0]), mapsOf(some[0])[0].map.unit, found(some), label)));
  for (const item of all(".sentences li")) item.classList.toggle("picked", item.dataset.run === view.run);
  for (const button of all(".pick")) press(button, button.dataset.run === view.run);
  markTowers();
}

let playing = 0, built = null; // built: when the towers stand
function play(on) {
  clearInterval(playing);
  playing = 0;
  press(byId("play"), on);
  byId("play").textContent = on ? "⏸" : "▶";
  if (!on) return;
  const known = steps();
  if (at(known, view.step) === known.length - 1) look({ step: known[0] });
  playing = setInterval(() => (at(known, view.step) >= known.length - 1 ? play(false) : stepBy(1)), 140);
}

if (everyRun.length) {
  byId("probe").append(...probes.map((name) => made("option", { value: name }, name.replaceAll("_", " "))));
  byId("probe").addEventListener("change", (event) => look({ probe: event.target.value }));
  byId("step").addEventListener("input", (event) => look({ step: steps()[+event.target.value] }));
  byId("own").addEventListener("change", (event) => look({ own: event.target.checked }));
  byId("play").addEventListener("click", () => play(!playing));
  for (const button of all(".pick")) button.addEventListener("click", () => look({ run: view.run === button.dataset.run ? null : button.dataset.run }));
  listeners.push((changes) => ("probe" in changes || "runs" in changes || "group" in changes ? buildModel() : paintModel()));
  pointing.push(markTowers);
  built = buildModel();
}
for (const button of all(".event")) {
  const { step, probe, layer, stack } = button.dataset;
  const place = { step: +step, ...(layer ? { layer: +layer, stack } : {}) };
  button.addEventListener("click", () => look({ ...place, ...(probes.includes(probe) ? { probe } : {}) }));
  button.addEventListener("pointerenter", () => point({ ...cursor(), ...place }));
  button.addEventListener("pointerleave", () => point(null));
}
