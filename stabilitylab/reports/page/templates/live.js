"use strict";
// A page that is written again while runs go on: it comes back to what was looked at, unless somebody is at work on it.
const pause = byId("pause");
function busy() {
  return pressed(pause) || playing || pointed || document.hidden || document.activeElement.matches("select, input[type=search]") || getSelection().toString();
}
// What an address does not hold: where the page stands, what is enlarged, unfolded, searched and focused.
function pathOf(element) {
  if (element.id) return `#${CSS.escape(element.id)}`;
  if (element.matches(".tick")) return `.tick[value="${CSS.escape(element.value)}"]`;
  return "";
}
function kept() {
  const opened = all("details[open] > summary").map((one) => one.textContent), searched = Object.fromEntries(all(".search").map((one) => [one.dataset.table, one.value]));
  const logs = all(".scale, .logx").map((one) => [one.getAttribute("aria-label"), pressed(one)]);
  const sorted = document.querySelector("#table th[aria-sort]");
  return { zooms: Object.fromEntries(zooms), scroll: [scrollX, scrollY], opened, searched, logs, focus: pathOf(document.activeElement),
    inner: all(".scroll").map((one) => one.scrollTop), sort: sorted && [sorted.textContent, sorted.getAttribute("aria-sort")] };
}
async function restore(state) {
  history.scrollRestoration = "manual";
  for (const one of all("details > summary")) if (state.opened.includes(one.textContent)) one.parentElement.open = true;
  for (const box of all(".search")) {
    box.value = state.searched[box.dataset.table] || "";
    if (box.value) filter(byId(box.dataset.table));
  }
  const logs = new Map(state.logs);
  for (const button of all(".scale, .logx")) {
    const on = logs.get(button.getAttribute("aria-label"));
    if (on !== undefined && on !== pressed(button)) press(button, on);
  }
  if (state.sort) {
    const button = all("#table .sort").find((one) => one.parentElement.textContent === state.sort[0]);
    for (let trial = 0; button && trial < 2 && button.parentElement.getAttribute("aria-sort") !== state.sort[1]; trial++) button.click();
  }
  await built;
  all(".scroll").forEach((one, place) => { one.scrollTop = state.inner[place] || 0; });
  if (state.focus && document.querySelector(state.focus)) document.querySelector(state.focus).focus({ preventScroll: true });
  scrollTo({ left: state.scroll[0], top: state.scroll[1], behavior: "instant" });
}
async function again() {
  await Promise.all([library, built]);
  const took = performance.now(); // since it was asked for: a slow browser gets time to show what it has loaded
  setInterval(() => {
    if (busy()) return;
    history.replaceState(kept(), "", address());
    location.reload();
  }, Math.max(1000 * +pause.dataset.every, 3 * took));
}
if (pause) {
  if (history.state && history.state.scroll) restore(history.state);
  pause.addEventListener("click", () => press(pause, !pressed(pause)));
  again();
}
