// Speed of the attention call over the length: a colour for each method, lines and symbols for its settings.

const LINES = ["solid", "dash", "dot"], SERIES = 8;
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "x"];

function styled(lines) {
  const families = [...new Set(lines.map((line) => line.family))], counts = {};
  return lines.map((line) => {
    const nth = (counts[line.family] = (counts[line.family] ?? -1) + 1);
    return {
      ...line, name: line.method, colour: `series-${(families.indexOf(line.family) % SERIES) + 1}`,
      symbol: SYMBOLS[nth % SYMBOLS.length], line: LINES[nth % LINES.length],
    };
  });
}

function speedLine({ method, points, from, colour: name, symbol, line }, visible) {
  const paint = colour(name);
  const [lengths, middle, low, high] = [0, 1, 2, 3].map((part) => points.map((point) => point[part]));
  const pays = from === null ? "at none of these lengths faster" : `faster from about ${from} tokens on`;
  const texts = points.map(([length, ...ratio]) => {
    const [at, first, last] = ratio.map(times);
    return [method, `${at} at ${length} tokens`, `quartiles ${first} to ${last}`, pays];
  });
  return {
    type: "scatter", mode: "lines+markers", visible, x: lengths, y: middle, error_y: bars(middle, low, high, paint, 0),
    line: { color: paint, width: 1.8, dash: line }, marker: { color: paint, symbol, size: 7 },
    customdata: texts, text: texts.map(hoverText), hovertemplate: "%{text}<extra></extra>",
  };
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
    const traces = series.map((line) => speedLine(line, shown.has(line.method)));
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
    const margin = { l: 66, r: 14, t: isNarrow ? 48 : 28, b: 56 }; // the note must not meet the buttons
    const layout = {
      margin,
      xaxis: {
        type: "log", range: x, tickvals: ticks, ticktext: ticks.map(String), title: { text: "tokens", standoff: 12 },
      },
      yaxis: ratioAxis(y, chart.clientHeight - margin.t - margin.b, 28, { title: { text: title, standoff: 8 } }),
      shapes: [across(1, colour("ink"), "solid"), { ...mark, line: { color: paint, width: 2, dash: "dash" } }],
      annotations: [note],
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
