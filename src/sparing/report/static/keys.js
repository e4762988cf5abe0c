// The key of a chart: a box for each kind of point, which shows and hides them.

const SHAPES = {
  circle: "M8 3a5 5 0 1 0 .01 0z",
  square: "M3.5 3.5h9v9h-9z",
  diamond: "M8 1.5 14.5 8 8 14.5 1.5 8z",
  star: "M8 .8l2.100 4.700 5.100.6-3.800 3.400 1.050 5L8 12l-4.450 2.500 1.050-5L.8 6.100l5.100-.6z",
  x: "m4 2 4 4 4-4 2 2-4 4 4 4-2 2-4-4-4 4-2-2 4-4-4-4z",
  "triangle-up": "M8 2l6 11H2z",
  "triangle-up-open": "M8 3l5 9.500H3z",
  "triangle-down": "M8 14l6-11H2z",
};
const DASHES = { solid: "none", dash: "6 4", dot: "2 3" };

// entries: {name, colour, symbol, line}; `show` gets the set of names that are ticked.
function keys(container, entries, show) {
  const boxes = entries.map(() => element("input", { type: "checkbox", checked: "" }));
  const ticked = () => new Set(entries.filter((_, i) => boxes[i].checked).map((entry) => entry.name));
  for (const box of boxes) box.addEventListener("change", () => show(ticked()));
  const labels = entries.map((entry, i) => {
    const text = entry.line ? code(entry.name) : element("span", {}, entry.name);
    return element("label", {}, boxes[i], swatch(entry), text);
  });
  const title = element("legend", { class: "hidden" }, "Show");
  container.replaceChildren(element("fieldset", { class: "keys" }, title, ...labels));
}

function swatch({ colour: name, symbol, line }) {
  const paint = `var(--${name})`, picture = vector("svg", { width: line ? 32 : 16, height: 16, "aria-hidden": "true" });
  if (line) {
    const style = `stroke:${paint};stroke-width:2;stroke-dasharray:${DASHES[line]}`;
    picture.append(vector("path", { d: "M0 8h32", style }));
  }
  const style = symbol.endsWith("open") ? `fill:none;stroke:${paint};stroke-width:1.5` : `fill:${paint}`;
  const transform = line ? "translate(10 2) scale(.75)" : "";
  picture.append(vector("path", { d: SHAPES[symbol], style, transform }));
  return picture;
}

function vector(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
