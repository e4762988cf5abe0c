// What both charts have in common: looks, marks, and what the keyboard does.

const CONFIG = {
  responsive: true,
  displaylogo: false,
  showTips: false,
  modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
};
const SMALL = 11.5;
const TIMES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const CLOSE_TIMES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 7, 10];

function look(layout) {
  const axis = { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, tickfont: { size: 12 } };
  const found = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
    hoverlabel: {
      bgcolor: colour("paper"), bordercolor: colour("muted"), font: { color: colour("ink") }, align: "left",
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("muted"), activecolor: colour("ink") },
    showlegend: false,
    hovermode: "closest",
    // A finger that drags wants to scroll the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    uirevision: "kept", // a zoom outlives a change of the theme
    ...layout,
  };
  for (const name of ["xaxis", "yaxis", "xaxis2"]) if (found[name]) found[name] = { ...axis, ...found[name] };
  return found;
}

// Ticks that are at least so many pixels apart, the first ones before the others; `place` is in pixels.
function thinned(ticks, gap, place) {
  const kept = [];
  for (const tick of ticks) if (kept.every((other) => Math.abs(place(tick) - place(other)) >= gap)) kept.push(tick);
  return kept;
}

// A logarithmic axis with ticks at round ratios, 1 among them.
function ratioAxis(range, pixels, gap, options) {
  const span = range[1] - range[0], all = span < 0.7 ? CLOSE_TIMES : TIMES;
  const ticks = thinned([1, ...all], gap, (tick) => (Math.log10(tick) * pixels) / span);
  return { type: "log", range, tickvals: ticks, ticktext: ticks.map(times), tickangle: 0, ...options };
}

function bars(middle, low, high, paint, width) {
  return {
    type: "data", symmetric: false, color: paint, thickness: 1, width,
    array: high.map((end, i) => end - middle[i]),
    arrayminus: low.map((end, i) => middle[i] - end),
  };
}

function across(at, paint, dash) {
  const line = { color: paint, width: 1.5, dash };
  return { type: "line", xref: "paper", x0: 0, x1: 1, y0: at, y1: at, line, layer: "between" };
}

// `steps()` lists {curve, point, subplot, text} in the order of the walk.
function walk(chart, now, steps) {
  let at = -1;
  const leave = () => {
    at = -1;
    now.textContent = "";
    Plotly.Fx.unhover(chart);
  };
  chart.addEventListener("keydown", (event) => {
    if (event.target !== chart) return; // but a button in it
    if (event.key === "Escape") leave();
    const stride = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const all = steps();
    if (!stride || !all.length) return;
    event.preventDefault();
    at = at < 0 && stride < 0 ? all.length - 1 : (at + stride + all.length) % all.length;
    const { curve, point, subplot, text } = all[at];
    Plotly.Fx.hover(chart, [{ curveNumber: curve, pointNumber: point }], subplot);
    now.textContent = text.join("; ");
  });
  chart.addEventListener("blur", leave);
}
