// Speed of the attention call over the length. What may be used has a colour, by its method, and its name at the line;
// the rest is faded. Lines and symbols tell the settings of a method apart.

const LINES = ["solid", "dash", "dot"], SERIES = 8;
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "x"];
const USABLE = ["safe and faster", "safe, but slower here", "safe, not timed", "cannot tell"]; // in the order of the names below the chart

function styled(lines) {
  const rank = ({ verdict }) => (USABLE.includes(verdict) ? USABLE.indexOf(verdict) : USABLE.length);
  const ordered = [...lines].sort((a, b) => rank(a) - rank(b));
  const families = [...new Set(ordered.map((line) => line.family))], counts = {};
  return ordered.map((line) => {
    const nth = (counts[line.family] = (counts[line.family] ?? -1) + 1), isFaded = rank(line) === USABLE.length;
    const series = `series-${(families.indexOf(line.family) % SERIES) + 1}`;
    return {
      ...line, name: line.method, isFaded, colour: isFaded ? "faded" : series,
      symbol: SYMBOLS[nth % SYMBOLS.length], line: LINES[nth % LINES.length],
    };
  });
}

function speedLine({ method, verdict, points, from, isFaded, colour: name, symbol, line }, visible) {
  const paint = colour(name);
  const [lengths, middle, low, high] = [0, 1, 2, 3].map((part) => points.map((point) => point[part]));
  const pays = from === null ? "at none of these lengths faster" : `faster from about ${from} tokens on`;
  const texts = points.map(([length, ...ratio]) => {
    const [at, first, last] = ratio.map(times);
    return [method, verdict, `${at} at ${length} tokens`, `quartiles ${first} to ${last}`, pays];
  });
  return {
    type: "scatter", mode: "lines+markers", visible, x: lengths, y: middle,
    error_y: { ...bars(middle, low, high, paint, 0), visible: !isFaded },
    line: { color: paint, width: isFaded ? 1.2 : 2.2, dash: line },
    marker: { color: paint, symbol, size: isFaded ? 5 : 7 },
    customdata: texts, text: texts.map(hoverText), hovertemplate: "%{text}<extra></extra>",
  };
}

function shortened(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}\u2026` : text;
}

// Names at the right ends of the lines that are not faded, of at most so many letters; on a phone inside the plot.
function endNotes(series, y, height, most, isNarrow) {
  const ends = series.map(({ points }) => points[points.length - 1]);
  const down = ends.map(([, ratio]) => (1 - (Math.log10(ratio) - y[0]) / (y[1] - y[0])) * height);
  const places = spread(down.map((at) => at - (isNarrow ? 12 : 0)), TALL + 1, height - TALL / 2);
  return series.map(({ label, colour: name }, i) => ({
    text: plain(shortened(label, most)), showarrow: false, font: { size: SMALL, color: colour(name) }, bgcolor: colour("veil"),
    xref: isNarrow ? "x domain" : "x", x: isNarrow ? 1 : Math.log10(ends[i][0]), borderpad: 0,
    xanchor: isNarrow ? "right" : "left", xshift: isNarrow ? 0 : 10,
    y: Math.log10(ends[i][1]), yanchor: "middle", yshift: down[i] - places[i],
  }));
}

function drawCrossover(chart) {
  const { lines, tokens } = DATA.crossover, series = styled(lines);
  const lengths = [...new Set(lines.flatMap(({ points }) => points.map(([length]) => length)))].sort((a, b) => a - b);
  const speeds = [...lines.flatMap(({ points }) => points.flatMap(([, ...ratio]) => ratio)), 0.8, 1.25].map(Math.log10);
  const ends = [...lengths, tokens].map(Math.log10), x = [Math.min(...ends) - 0.06, Math.max(...ends) + 0.06];
  const y = [Math.min(...speeds) - 0.05, Math.max(...speeds) + 0.1], here = Math.log10(tokens);
  let shown = new Set(lines.map((line) => line.method)), steps = [];

  const draw = () => {
    const isNarrow = chart.clientWidth < 560, paint = colour("muted");
    const title = isNarrow ? "speed of a call" : "speed of an attention call (exact: 1x)";
    const traces = [...series].reverse().map((line) => speedLine(line, shown.has(line.method)));
    const named = series.filter((line) => !line.isFaded && shown.has(line.method));
    steps = traces.flatMap(({ visible, customdata }, curve) => {
      return visible ? customdata.map((text, point) => ({ curve, point, subplot: "xy", text })) : [];
    });
    const everyOther = lengths.filter((_, i) => (lengths.length - 1 - i) % 2 === 0);
    const ticks = isNarrow && lengths.length > 5 ? everyOther : lengths;
    const mark = { type: "line", yref: "paper", y0: 0, y1: 1, x0: tokens, x1: tokens, layer: "between" };
    const note = {
      text: `your documents: ${tokens}`, showarrow: false, font: { size: SMALL, color: paint },
      x: here, xanchor: here > (x[0] + x[1]) / 2 ? "right" : "left", y: 1, yref: "paper", yanchor: "bottom",
    };
    const most = Math.floor(((isNarrow ? 0.6 : 0.3) * chart.clientWidth) / LETTER);
    const widest = LETTER * Math.min(most, Math.max(0, ...named.map(({ label }) => label.length)));
    // The note must not meet the buttons.
    const margin = { l: isNarrow ? 58 : 66, r: isNarrow ? 14 : Math.max(14, widest), t: isNarrow ? 48 : 28, b: 56 };
    const height = chart.clientHeight - margin.t - margin.b;
    const layout = {
      margin,
      xaxis: {
        type: "log", range: x, tickvals: ticks, ticktext: ticks.map(String), title: { text: "tokens", standoff: 12 },
      },
      yaxis: ratioAxis(y, height, 28, { title: { text: title, standoff: 8 } }),
      shapes: [across(1, colour("ink"), "solid"), { ...mark, line: { color: paint, width: 2, dash: "dash" } }],
      annotations: [note, ...endNotes(named, y, height, most, isNarrow)],
    };
    Plotly.react(chart, traces, look(layout), CONFIG);
  };

  keys(document.getElementById("crossover-keys"), series, (ticked) => {
    shown = ticked;
    draw();
  });
  walk(chart, document.getElementById("crossover-now"), () => steps);
  keepDrawn(draw, chart);
}

if (document.getElementById("crossover")) drawCrossover(document.getElementById("crossover"));
