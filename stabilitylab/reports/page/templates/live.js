"use strict";
// A page that is written again while runs go on: it comes back to what was looked at, unless somebody is at work on it.
const pause = byId("pause");
function busy() {
  return pressed(pause) || playing || pointed || document.hidden || /^(INPUT|SELECT)$/.test(document.activeElement.tagName) || getSelection().toString();
}
async function again() {
  await Promise.all([library, built]);
  const took = performance.now(); // since it was asked for: a slow browser gets time to show what it has loaded
  setInterval(() => {
    if (busy()) return;
    history.replaceState(null, "", address());
    location.reload(); // its place on the page is the browser's to keep
  }, Math.max(1000 * +pause.dataset.every, 3 * took));
}
if (pause) {
  pause.addEventListener("click", () => press(pause, !pressed(pause)));
  again();
}
