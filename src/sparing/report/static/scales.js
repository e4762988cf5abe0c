// The axes of change and speed.

// Linear near zero and logarithmic beyond: a change may be 0 (exact attention), and below (a lower perplexity).
function bend(change, linear) {
  return Math.sign(change) * Math.log10(1 + Math.abs(change) / linear);
}

// Where the axes begin and end, so that all points and the tolerance are on them.
// isSigned: whether a change can be below 0, so that there is room for it.
function tradeScales(timed, oracles, tolerance, isSigned) {
  const changes = [...timed, ...oracles].map((point) => point.change);
  const sizes = changes.map(([mean]) => Math.abs(mean)).filter((size) => size > 0);
  const linear = Math.min(Math.max(Math.min(...sizes, tolerance), tolerance / 100), tolerance / 2);
  const ends = changes.flat().filter((end) => end !== null);
  const high = bend(Math.max(...ends, 2 * tolerance), linear), low = isSigned ? bend(Math.min(...ends, -linear / 4), linear) : 0;
  const room = 0.06 * (high - low), below = isSigned ? room : 0.03 * high, logs = timed.flatMap((point) => point.speed).map(Math.log10);
  const side = Math.max(0.08, 0.06 * (Math.max(...logs) - Math.min(...logs)));
  return {
    linear, height: (change) => bend(change, linear), y: [low - below, high + room], ends: [low, high],
    x: [Math.min(...logs) - side, Math.max(...logs) + side],
  };
}

// 0, and powers of ten where there is room for them.
function changeTicks({ linear, height, y, ends: [low, high] }, pixels) {
  const found = [0];
  for (let power = Math.ceil(Math.log10(linear) - 1e-6); height(10 ** power) <= Math.max(high, -low); power++) {
    found.push(10 ** power, -(10 ** power));
  }
  const inside = found.filter((tick) => height(tick) >= low && height(tick) <= high);
  return thinned(inside, 22, (tick) => (height(tick) * pixels) / (y[1] - y[0]));
}
