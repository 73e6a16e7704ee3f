"use strict";
// Which runs are shown, and how each is drawn. What is chosen in the table of runs drives every panel.
// Colours differ in lightness too, and lines in dash, so that grey print and colour-blind eyes tell neighbours apart.
const PALETTE = ["#1b4f9c", "#d98200", "#a3195b", "#3fa9d8", "#00694b", "#e0602a", "#6a3d9a", "#8c8c00"];
const PATTERNS = ["solid", "dash", "dot", "dashdot"];
const order = told.order;
const groupOf = (name) => (view.group === "architecture" ? told.labels[name] : (told.settings[name] || {})[view.group]) ?? "–";
const slots = new Map(); // what has a colour (a run, or a group of runs) -> its place in the palette
let shownNames = new Set();

function choose() {
  const names = view.runs === null ? order.slice(0, told.most) : view.runs.filter((name) => order.includes(name));
  shownNames = new Set(names);
  const wanted = new Set(view.group ? order.map(groupOf) : names);
  for (const held of [...slots.keys()]) if (!wanted.has(held)) slots.delete(held);
  for (const name of wanted) {
    if (slots.has(name)) continue;
    const taken = new Set(slots.values());
    let free = 0;
    while (taken.has(free)) free++;
    slots.set(name, free);
  }
}
const isShown = (name) => order.length < 2 || shownNames.has(name);
// The look of a run's line: null where its architecture gives it one.
function lookOf(name) {
  if (!told.byRun && !view.group) return null;
  const slot = slots.get(view.group ? groupOf(name) : name) ?? 0;
  return { colour: PALETTE[slot % PALETTE.length], dash: PATTERNS[slot % PATTERNS.length] };
}
// The look that the curves of a run have from its architecture; none without a curve.
const ownLooks = new Map((plots.curves || []).flatMap((plot) => plot.traces.map(({ name, colour, dash }) => [name, { colour, dash }])));
const shownInOrder = () => order.filter((name) => shownNames.has(name));
function setShown(names) { look({ runs: names }); }

const byValue = (a, b) => (isNaN(a) || isNaN(b) ? String(a).localeCompare(String(b), "en", { numeric: true }) : a - b);

function paintTable() {
  for (const tick of all(".tick")) tick.checked = shownNames.has(tick.value);
  for (const swatch of all(".of-run")) {
    const found = lookOf(swatch.dataset.run) || ownLooks.get(swatch.dataset.run), on = isShown(swatch.dataset.run);
    swatch.style.visibility = on && found ? "visible" : "hidden";
    if (!found) continue;
    swatch.style.color = visible(found.colour);
    const path = swatch.querySelector("path");
    if (path) path.setAttribute("class", found.dash);
  }
  for (const row of all("#table tbody tr")) row.classList.toggle("shown", shownNames.has(row.dataset.run));
  for (const item of all(".sentences li[data-run]")) item.hidden = !isShown(item.dataset.run);
  for (const track of all(".track")) track.hidden = !isShown(track.dataset.run);
  const count = byId("shown-count");
  if (count) count.textContent = `${shownNames.size} of ${order.length} shown`;
  const box = byId("groups");
  if (!box) return;
  byId("group").value = view.group;
  const values = view.group ? [...new Set(order.map(groupOf))].sort(byValue) : [];
  box.hidden = !values.length;
  box.replaceChildren(...values.map((value) => {
    const own = order.filter((name) => groupOf(name) === value), on = own.filter((name) => shownNames.has(name)).length;
    const chip = made("button", { type: "button", className: "toggle" }, `${value} (${on}/${own.length})`);
    chip.prepend(patchOf(visible(PALETTE[(slots.get(value) ?? 0) % PALETTE.length])));
    press(chip, on > 0);
    chip.addEventListener("click", () => {
      const index = values.indexOf(value), kept = shownInOrder().filter((name) => groupOf(name) !== value);
      setShown(on ? kept : [...kept, ...own]);
      all("button", box)[index].focus(); // the chips were made again
    });
    return chip;
  }));
}

if (byId("group")) {
  const values = (key) => new Set(order.map((name) => (told.settings[name] || {})[key] ?? "–"));
  const keys = [...new Set(order.flatMap((name) => Object.keys(told.settings[name] || {})))].filter((key) => values(key).size > 1 && values(key).size <= 12);
  const names = [...(new Set(Object.values(told.labels)).size > 1 ? ["architecture"] : []), ...keys];
  byId("group").append(...names.map((name) => made("option", { value: name }, name)));
  byId("group").addEventListener("change", (event) => look({ group: event.target.value }));
  for (const tick of all(".tick")) {
    tick.addEventListener("change", () => setShown(tick.checked ? [...shownInOrder(), tick.value] : shownInOrder().filter((name) => name !== tick.value)));
    tick.addEventListener("keydown", (event) => {
      const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const ticks = all(".tick").filter((one) => !one.closest("tr").hidden), next = ticks[ticks.indexOf(tick) + move];
      if (next) next.focus();
    });
  }
  const found = () => all("#table tbody tr").filter((row) => !row.hidden).map((row) => row.dataset.run);
  const buttons = { "show-found": found, "show-none": () => [], "show-first": () => null };
  for (const [id, names_] of Object.entries(buttons)) byId(id).addEventListener("click", () => setShown(names_()));
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
    event.preventDefault();
    document.querySelector('.search[data-table="table"]').focus();
  });
}
choose();
listeners.push((changes) => {
  if (!("runs" in changes || "group" in changes)) return;
  choose();
  paintTable();
});
