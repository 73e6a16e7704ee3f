"use strict";
// A page that is written again while runs go on: it comes back to what was looked at, unless somebody is at work on it.
const pause = byId("pause");
if (pause) {
  const busy = () => pressed(pause) || playing || pointed || document.hidden || /^(INPUT|SELECT)$/.test(document.activeElement.tagName) || getSelection().toString();
  pause.addEventListener("click", () => press(pause, !pressed(pause)));
  setInterval(() => {
    if (busy()) return;
    history.replaceState(null, "", address());
    location.reload(); // its place on the page is the browser's to keep
  }, 1000 * +pause.dataset.every);
}
