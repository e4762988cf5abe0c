// What all parts share. Texts of the user go to textContent, or through `plain` where plotly would read markup.

const DATA = JSON.parse(document.getElementById("data").textContent);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A spec may break after its name, too.
function code(spec) {
  const parts = spec.split("(");
  return element("code", {}, ...parts.flatMap((part, i) => (i ? ["(", element("wbr"), part] : [part])));
}

// A custom property of the style sheet, so that charts have the colours of the page.
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function plain(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// Lines for plotly's hover text. Long ones are folded: a phone cuts off what does not fit beside a point.
function hoverText(lines) {
  const folded = lines.flatMap((line) => line.match(/.{1,34}(?=\s|$)\s*|.{1,34}/gsu) ?? []);
  return folded.map(plain).join("<br>");
}

function percent(share) {
  const value = 100 * share, size = Math.abs(value);
  if (size >= 1e4) return `${Number(value.toPrecision(2)).toExponential().replace("+", "")}%`;
  if (size >= 10) return `${value.toFixed(0)}%`;
  return size >= 0.01 ? `${Number(value.toPrecision(3))}%` : `${Number(value.toPrecision(1))}%`;
}

function times(ratio) {
  return ratio >= 10 ? `${ratio.toFixed(0)}x` : `${Number(ratio.toPrecision(ratio < 0.1 ? 2 : 3))}x`;
}

const redraws = [];

// Draw now, and again when the theme or the width changes.
function keepDrawn(draw, container) {
  let width = container.clientWidth;
  draw();
  redraws.push(draw);
  new ResizeObserver(() => {
    if (container.clientWidth === width) return;
    width = container.clientWidth;
    requestAnimationFrame(draw);
  }).observe(container);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((draw) => draw()));
