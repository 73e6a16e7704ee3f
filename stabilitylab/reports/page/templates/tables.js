"use strict";
// Tables: a row is shown where all filters are on for it and every searched word is in it.
function filter(table) {
  const groups = table.id === "ledger" ? all(".filter") : [], rows = all("tbody tr", table);
  const words = document.querySelector(`.search[data-table="${table.id}"]`).value.toLowerCase().split(/\s+/);
  const on = groups.map((group) => [group.dataset.filter, new Set(all(".toggle", group).filter(pressed).map((button) => button.dataset.value))]);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !(on.every(([name, values]) => values.has(row.dataset[name])) && words.every((word) => text.includes(word)));
  }
  document.querySelector(`.found[data-table="${table.id}"]`).textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
}
for (const table of ["ledger", "table"].map(byId).filter(Boolean)) {
  document.querySelector(`.search[data-table="${table.id}"]`).addEventListener("input", () => filter(table));
  filter(table);
}
for (const button of all(".filter .toggle")) {
  button.addEventListener("click", () => {
    press(button, !pressed(button));
    filter(document.getElementById("ledger"));
  });
}
// A link to what a filter hides, or what is folded, shows it.
function reveal() {
  const name = decodeURIComponent(location.hash.slice(1)), place = name && byId(name);
  if (!place) return;
  let closed = place.hidden;
  place.hidden = false;
  for (let each = place.closest("details"); each; each = each.parentElement.closest("details")) {
    closed ||= !each.open;
    each.open = true;
  }
  if (closed) place.scrollIntoView();
}
addEventListener("hashchange", reveal);
reveal();

// Table of runs: a click on a heading sorts, numbers as numbers.
all("#table .sort").forEach((button, column) => button.addEventListener("click", () => {
  const heading = button.parentElement, down = heading.getAttribute("aria-sort") === "ascending";
  all("#table th[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.children[column].dataset.sort || row.children[column].textContent.trim();
  const order = (a, b) => (a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b, "en", { numeric: true }));
  const body = document.querySelector("#table tbody");
  body.append(...all("tr", body).sort((a, b) => order(value(a), value(b)) * (down ? -1 : 1)));
}));
