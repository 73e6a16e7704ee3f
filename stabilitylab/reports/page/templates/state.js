"use strict";
// What is looked at. It stands in the address, so that a view can be sent and a live page comes back to it; step null
// is the last one, whatever comes.
// runs: the names of those that are shown, null for the first; own: null where the numbers decide.
const nothing = { probe: null, step: null, layer: null, stack: null, run: null, own: null, a: "", b: "", runs: null, group: "", smooth: 0 };
const view = { ...nothing, ...told.start, ...fromAddress() };
const listeners = [];     // called with what changed of the view
let pointed = null;       // {step, layer, stack} under the pointer, in any panel
const pointing = [];      // called when that changes
let writing = 0;

function fromAddress() {
  const text = location.hash.slice(1), found = {};
  if (!text.includes("=")) return found;
  for (const [key, value] of new URLSearchParams(text)) {
    if (!(key in nothing)) continue;
    if (key === "step" || key === "layer") found[key] = value === "last" || isNaN(value) ? null : +value;
    else if (key === "runs") found.runs = [...(found.runs || []), ...(value ? [value] : [])];
    else found[key] = key === "own" ? value === "true" : key === "smooth" ? +value || 0 : value;
  }
  return found;
}

function address() {
  const kept = new URLSearchParams();
  for (const [key, value] of Object.entries(view)) {
    if (Array.isArray(value)) for (const each of value.length ? value : [""]) kept.append(key, each);
    else if (value !== nothing[key]) kept.set(key, value);
  }
  if (view.step === null) kept.set("step", "last");
  return `#${kept}`;
}

function look(changes) {
  Object.assign(view, changes);
  clearTimeout(writing); // browsers count how often an address changes
  writing = setTimeout(() => history.replaceState(history.state, "", address()), 200);
  for (const listener of listeners) listener(changes);
}

let waiting = false;
function point(place) {
  pointed = place;
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const listener of pointing) listener();
  });
}
const cursor = () => pointed || { step: shownStep(), layer: view.layer, stack: view.stack };
