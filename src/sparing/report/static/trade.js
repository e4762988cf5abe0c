// Change at the end of the model against its speed.

const VERDICTS = {
  "exact attention": { colour: "exact", symbol: "square", size: 10 },
  "safe and faster": { colour: "faster", symbol: "star", size: 15 },
  "safe, but slower here": { colour: "slower", symbol: "circle", size: 10 },
  "safe, not timed": { colour: "slower", symbol: "circle-open", size: 10 },
  "cannot tell": { colour: "series-5", symbol: "diamond", size: 10 },
  "not safe": { colour: "unsafe", symbol: "x", size: 9 },
  oracle: { colour: "oracle", symbol: "triangle-up-open", size: 11 },
};
const RANKS = { "safe and faster": 0, "safe, but slower here": 1, "exact attention": 2 }; // these must have a name
const EXACT = {
  method: "the model's own attention", label: "the model's own", verdict: "exact attention", front: true,
  change: [0, null, null], speed: [1, 1, 1],
};

function tradeText(point) {
  if (point === EXACT) return [point.method, "change 0%, speed 1x"];
  const [mean, low, high] = point.change, text = [point.method, point.verdict, `change ${percent(mean)}`];
  text.push(low === null || high === null ? "without an interval" : `interval ${percent(low)} to ${percent(high)}`);
  if (point.speed) {
    const [middle, first, last] = point.speed.map(times);
    text.push(`${middle} as fast as exact`, `quartiles ${first} to ${last}`);
  }
  return text;
}

function pointsOf(verdict, points, scales, visible) {
  const { colour: name, symbol, size } = VERDICTS[verdict], paint = colour(name), isOracle = verdict === "oracle";
  const heights = [0, 1, 2].map((part) => points.map(({ change }) => scales.height(change[part] ?? change[0])));
  const spread = points.map((_, i) => (i + 0.5) / points.length);
  const places = isOracle ? [spread, spread, spread] : [0, 1, 2].map((part) => points.map((point) => point.speed[part]));
  const texts = points.map(tradeText);
  return {
    type: "scatter", mode: "markers", name: verdict, visible,
    xaxis: isOracle ? "x2" : "x", x: places[0], y: heights[0],
    error_x: bars(...places, paint, 0), error_y: bars(...heights, paint, 4),
    marker: { color: paint, symbol, size, line: { width: isOracle ? 1.5 : 0 } },
    customdata: texts, text: texts.map(hoverText), hovertemplate: "%{text}<extra></extra>",
  };
}

function onFront(timed) {
  return timed.filter((point) => point.front).sort((a, b) => a.speed[0] - b.speed[0]);
}

function frontLine(timed, scales) {
  const best = onFront(timed);
  return {
    type: "scatter", mode: "lines", hoverinfo: "skip",
    x: best.map((point) => point.speed[0]), y: best.map((point) => scales.height(point.change[0])),
    line: { shape: "vh", color: colour("muted"), width: 1.5, dash: "dot" },
  };
}

// Names of points, as notes of plotly, beside all points, their bars and the words on the lines; those that are safe have
// one in any case. `numbered` lists what has a number for want of room.
function names(points, scales, width, height) {
  const right = (speed) => ((Math.log10(speed) - scales.x[0]) / (scales.x[1] - scales.x[0])) * width;
  const down = (change) => (1 - (scales.height(change) - scales.y[0]) / (scales.y[1] - scales.y[0])) * height;
  const taken = points.flatMap(({ change: [mean, low, high], speed: [middle, first, last] }) => {
    const x = right(middle), y = down(mean);
    return [
      [x - 6, y - 6, x + 6, y + 6], [right(first), y - 1, right(last), y + 1],
      [x - 1, down(high ?? mean), x + 1, down(low ?? mean)],
    ];
  });
  const best = onFront(points), line = down(DATA.trade.tolerance);
  best.slice(1).forEach((point, i) => {
    const [left, end] = [best[i], point].map(({ speed: [speed] }) => right(speed));
    const [low, high] = [best[i], point].map(({ change: [mean] }) => down(mean));
    taken.push([left - 1, high, left + 1, low], [left, high - 1, end, high + 1]);
  });
  taken.push([width - 105, line - 1, width, line + 18], [0, line - 18, 110, line]);
  const rank = ({ verdict, front }) => RANKS[verdict] ?? (front ? 3 : verdict === "not safe" ? 5 : 4);
  const order = [...points].sort((a, b) => rank(a) - rank(b)).filter((point) => width > 450 || rank(point) < 4);
  const labels = order.map((point) => {
    return { x: right(point.speed[0]), y: down(point.change[0]), text: point.label, must: rank(point) < 3 };
  });
  const placed = placeLabels(labels, taken, width, height), notes = [], numbered = [];
  placed.forEach((place, i) => {
    if (!place) return;
    const { speed: [speed], change: [mean], label } = order[i];
    notes.push(labelNote(labels[i], place, { x: Math.log10(speed), y: scales.height(mean) }));
    if (place.text !== label) numbered.push(label); // it is the number of this item
  });
  return { notes, numbered };
}

function tolerance(scales) {
  const edge = scales.height(DATA.trade.tolerance), low = Math.max(-edge, scales.y[0]), paint = colour("muted");
  const good = {
    type: "rect", x0: 1, x1: 10 ** scales.x[1], y0: low, y1: edge,
    fillcolor: colour("faster"), opacity: 0.1, line: { width: 0 }, layer: "below",
  };
  const note = { showarrow: false, xref: "x domain", y: edge, font: { size: SMALL, color: paint } };
  const text = `tolerance ${percent(DATA.trade.tolerance)}`, green = { size: SMALL, color: colour("faster") };
  return {
    shapes: [good, across(edge, paint, "dash"), ...(low > scales.y[0] ? [across(low, paint, "dash")] : [])],
    annotations: [
      { ...note, text, x: 0.005, xanchor: "left", yanchor: "bottom" },
      { ...note, text: "safe and faster", x: 0.995, xanchor: "right", yanchor: "top", font: green },
    ],
  };
}

function drawTrade(chart) {
  const { points, oracles, metric } = DATA.trade, timed = [EXACT, ...points], all = [...timed, ...oracles];
  const scales = tradeScales(timed, oracles, DATA.trade.tolerance, DATA.trade.signed);
  const used = Object.keys(VERDICTS).filter((verdict) => all.some((point) => point.verdict === verdict));
  let shown = new Set(used), steps = [];

  const draw = () => {
    const isNarrow = chart.clientWidth < 560, margin = { l: isNarrow ? 58 : 74, r: 10, t: 28, b: 56 };
    const share = oracles.length ? (isNarrow ? 0.8 : 0.88) : 1; // of the width; oracles have the rest
    const groups = used.map((verdict) => {
      return pointsOf(verdict, all.filter((point) => point.verdict === verdict), scales, shown.has(verdict));
    });
    steps = groups.flatMap(({ visible, customdata, xaxis }, i) => {
      if (!visible) return [];
      return customdata.map((text, point) => ({ curve: i + 1, point, subplot: `${xaxis}y`, text }));
    });
    const width = (chart.clientWidth - margin.l - margin.r) * share, height = chart.clientHeight - margin.t - margin.b;
    const ticks = changeTicks(scales, height);
    const { notes, numbered } = names(timed.filter((point) => shown.has(point.verdict)), scales, width, height);
    document.getElementById("trade-names").replaceChildren(...numbered.map((name) => element("li", {}, name)));
    const { shapes, annotations } = tolerance(scales);
    const xTitle = isNarrow ? "speed (exact: 1x)" : "speed of the model (exact: 1x; further right is faster)";
    const yTitle = isNarrow ? "change" : plain(`change (${metric})`);
    const layout = {
      margin, shapes, annotations: [...annotations, ...notes],
      xaxis: ratioAxis(scales.x, width, 36, { domain: [0, share], title: { text: xTitle, standoff: 12 } }),
      yaxis: {
        range: scales.y, tickvals: ticks.map(scales.height), ticktext: ticks.map(percent),
        title: { text: yTitle, standoff: 8 },
      },
    };
    if (oracles.length) {
      const only = { domain: [share + 0.02, 1], range: [0, 1], tickvals: [0.5], ticktext: ["oracles"] };
      layout.xaxis2 = { ...only, anchor: "y", showgrid: false, fixedrange: true };
    }
    Plotly.react(chart, [frontLine(timed, scales), ...groups], look(layout), CONFIG);
  };

  const entries = used.map((name) => ({ name, ...VERDICTS[name] }));
  keys(document.getElementById("trade-keys"), entries, (ticked) => {
    shown = ticked;
    draw();
  });
  walk(chart, document.getElementById("trade-now"), () => steps);
  keepDrawn(draw, chart);
}

if (document.getElementById("trade")) drawTrade(document.getElementById("trade"));
