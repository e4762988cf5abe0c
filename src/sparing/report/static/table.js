"use strict";
// Sorting of the table, and copying of the code.

function sortValue(cell) {
  const held = cell.dataset.value;
  if (held === undefined) return null;
  return held.trim() === "" || Number.isNaN(Number(held)) ? held : Number(held);
}

function inOrder(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const of = (row) => sortValue(row.cells[column]);
    head.querySelector("button").addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, rows = [...body.rows];
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const known = rows.filter((row) => of(row) !== null).sort((a, b) => sign * inOrder(of(a), of(b)));
      body.append(...known, ...rows.filter((row) => of(row) === null));
    });
  });
}

if (document.getElementById("rows")) makeSortable(document.getElementById("rows"));

// A sign that a table goes on beside its frame.
for (const frame of document.querySelectorAll(".scroll")) {
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.setAttribute("aria-hidden", "true");
  hint.textContent = "scroll sideways for more columns \u2192";
  frame.before(hint);
  const update = () => {
    const hidden = frame.scrollWidth - frame.clientWidth;
    hint.hidden = hidden < 2;
    frame.classList.toggle("more", hidden - frame.scrollLeft > 2);
  };
  frame.addEventListener("scroll", update);
  new ResizeObserver(update).observe(frame);
  update();
}

async function copy(source) {
  try {
    await navigator.clipboard.writeText(source.textContent);
    return true;
  } catch {
    // Some browsers keep the clipboard from pages that are files; what is selected can still be copied.
    getSelection().selectAllChildren(source);
    return document.execCommand("copy");
  }
}

document.getElementById("copy")?.addEventListener("click", async (event) => {
  const said = (await copy(document.getElementById("code"))) ? "Copied" : "Selected: press Ctrl+C";
  event.target.textContent = said;
  document.getElementById("copied").textContent = said;
});
