"use strict";
// Two runs side by side: what was set otherwise, their curves, and how many times one's numbers are the other's.
async function ratio(a, b) {
  const [codesA, codesB] = [await unpacked(a.map), await unpacked(b.map)], x = a.map.x.filter((step) => b.map.x.includes(step));
  const value = (map, list, row, step) => measured(map, list[row * map.x.length + map.x.indexOf(step)]);
  const z = a.map.y.map((_, row) => x.map((step) => {
    const [one, other] = [value(a.map, codesA, row, step), value(b.map, codesB, row, step)];
    return one > 0 && other > 0 ? Math.log10(one / other) : null;
  }));
  return { x, y: a.map.y, z, ratio: true, findings: [], origin: a.map.origin, log: false, unit: "log₁₀ (A / B)" };
}

function rows(head, body) {
  const cells = (row, name) => made("tr", {}, ...row.map((text) => made(name, {}, text)));
  return made("table", {}, made("thead", {}, cells(head, "th")), made("tbody", {}, ...body.map((row) => cells(row, "td"))));
}

let asked = 0;
async function buildPair() {
  const { a, b } = view, own = ++asked, both = a && b && a !== b, known = Object.keys(told.settings);
  for (const side of all(".side")) side.value = known.includes(view[side.dataset.side]) ? view[side.dataset.side] : "";
  byId("parted").hidden = !both || !known.includes(a) || !known.includes(b);
  if (byId("parted").hidden) return;
  const pair = told.pairs.find((one) => (one.a === a && one.b === b) || (one.a === b && one.b === a)), other = (key) => [told.settings[a][key] ?? "–", told.settings[b][key] ?? "–"];
  const differing = [...new Set([...Object.keys(told.settings[a]), ...Object.keys(told.settings[b])])].filter((key) => other(key)[0] !== other(key)[1]);
  byId("part-said").textContent = pair ? pair.paragraph : `Where they part: stabilitylab compare ${a} ${b}`;
  byId("part-settings").replaceChildren(made("h4", {}, "Settings that differ"), differing.length ? rows(["", "A", "B"], differing.map((key) => [key, ...other(key)])) : made("p", {}, "None."));
  byId("part-growth").replaceChildren(...(pair && pair.growth.length ? [made("h4", {}, "Where they part"), rows(["differ by more than", "step", "probe", "where"], pair.growth.map((one) => [`${short(100 * one.above)} %`, String(one.step), one.probe, one.where]))] : []));
  const lines = plots.curves.map((plot) => ({ ...plot, pair: true, traces: plot.traces.filter(({ name }) => name === a || name === b).map((one) => ({ ...one, dash: one.name === a ? "solid" : "dash" })) }));
  const [left, right] = [a, b].map((name) => everyRun.find((run) => run.name === name)), panels = [], specs = [];
  for (const plot of lines.filter((each) => each.traces.length)) {
    specs.push(plot);
    panels.push(panelOf(plot.title, "two", specs.length - 1, `${plot.y.title} by ${plot.x.title}, of ${a} and ${b}`));
  }
  for (const one of left && right ? mapsOf(left) : []) {
    const match = mapsOf(right).find((each) => each.stack === one.stack && each.map.y.length === one.map.y.length);
    if (!match) continue;
    const plot = plots[left.figure][one.place];
    specs.push({ ...plot, traces: [], references: [], map: await ratio(one, match) });
    panels.push(panelOf(`${view.probe.replaceAll("_", " ")}, A over B${one.stack ? `, ${one.stack}` : ""}`, "two", specs.length - 1, `Map of the ratio of ${view.probe} of ${a} to ${b}`));
  }
  if (own !== asked) return; // another pair was chosen meanwhile
  plots.two = specs;
  const note = left && right ? (specs.some((one) => one.map) ? [] : [made("p", { className: "source" }, "No map of ratios: their layers are not the same in number, or one has no such probe.")])
    : [made("p", { className: "source" }, "No map of ratios: this page holds the layers of the runs at its top; stabilitylab report A B holds those of two.")];
  byId("two-panels").style.setProperty("--columns", Math.min(3, Math.max(1, panels.length)));
  byId("two-panels").replaceChildren(...panels, ...note);
  const legend = made("p", { className: "signs" }, made("span", {}, `A (solid): ${a}`), made("span", {}, `B (dashed): ${b}`));
  byId("two-panels").before(...(byId("two").querySelector(":scope > .signs") ? [] : [legend]));
  byId("two").querySelector(":scope > .signs").replaceChildren(...legend.childNodes);
  all(".plot", byId("two-panels")).forEach((each) => watcher.observe(each));
}

if (byId("compare")) {
  for (const side of all(".side")) side.addEventListener("change", () => look({ [side.dataset.side]: side.value }));
  listeners.push((changes) => {
    if ("runs" in changes && shownNames.size === 2) look({ a: shownInOrder()[0], b: shownInOrder()[1] }); // two alone are compared
  });
  listeners.push((changes) => { if ("a" in changes || "b" in changes || "probe" in changes) buildPair(); });
}
