// Names beside points. Those that must be read are always placed: further off with a line, or as a number.

const LETTER = 6.5, TALL = 14, GAP = 6; // pixels, of a font of `SMALL`
const NEAR = [[1, -1], [1, 1], [-1, -1], [-1, 1], [1, 0], [-1, 0]]; // side and height of a name right beside its point
const FAR = [24, 38, 54, 72, 94, 120, 150]; // pixels to a name with a line

// labels: {x, y, text, must} in pixels; taken: boxes [left, top, right, bottom] of everything else.
// Gives {text, box, isFar} for each, or null where one that need not be has no room.
function placeLabels(labels, taken, width, height) {
  const used = [...taken];
  let count = 0;
  const isFree = (box) => {
    const isInside = box[0] >= 0 && box[1] >= 0 && box[2] <= width && box[3] <= height;
    return isInside && !used.some((other) => overlap(box, other));
  };
  const find = (label, text) => {
    const near = NEAR.map(([side, up]) => nearBox(label, text, side, up)).find(isFree);
    if (near || !label.must) return near ? { text, box: near, isFar: false } : null;
    const far = FAR.flatMap((distance) => farBoxes(label, text, distance)).find(isFree);
    return far ? { text, box: far, isFar: true } : null;
  };
  return labels.map((label) => {
    let found = find(label, label.text);
    if (!found && label.must) {
      const text = String((count += 1));
      found = find(label, text) ?? { text, box: nearBox(label, text, 1, -1), isFar: false };
    }
    if (found) used.push(found.box);
    return found;
  });
}

function nearBox({ x, y }, text, side, up) {
  const wide = text.length * LETTER, middle = y + up * (GAP + TALL / 2);
  const left = side < 0 ? x - GAP - 1 - wide : x + GAP + 1;
  return [left, middle - TALL / 2, left + wide, middle + TALL / 2];
}

function farBoxes({ x, y }, text, distance) {
  const wide = text.length * LETTER;
  return Array.from({ length: 12 }, (_, i) => {
    const [right, down] = [Math.cos((i * Math.PI) / 6), Math.sin((i * Math.PI) / 6)];
    const middle = y - distance * down, at = x + distance * right;
    const left = right > 0.3 ? at : right < -0.3 ? at - wide : at - wide / 2;
    return [left, middle - TALL / 2, left + wide, middle + TALL / 2];
  });
}

function overlap(a, b) {
  return a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
}

// What plotly writes: `at` is the point in its axes, {x, y} in pixels.
function labelNote({ x, y }, { text, box, isFar }, at) {
  const middle = (box[1] + box[3]) / 2 - y, font = { size: SMALL, color: colour("ink") };
  const note = { ...at, text: plain(text), font, borderpad: 0, yanchor: "middle" };
  if (!isFar) return { ...note, showarrow: false, xanchor: "left", xshift: box[0] - x, yshift: -middle };
  const xanchor = box[0] >= x ? "left" : box[2] <= x ? "right" : "center";
  const tail = { left: box[0], right: box[2], center: (box[0] + box[2]) / 2 }[xanchor] - x;
  const line = { arrowhead: 0, arrowwidth: 1, arrowcolor: colour("muted"), standoff: 5 };
  return { ...note, ...line, showarrow: true, xanchor, ax: tail, ay: middle };
}

// Heights in pixels, moved apart so that names of the given height do not meet; the order stays.
function spread(heights, gap, most) {
  const order = heights.map((_, i) => i).sort((a, b) => heights[a] - heights[b]), found = [...heights];
  order.forEach((i, n) => {
    if (n) found[i] = Math.max(found[i], found[order[n - 1]] + gap);
  });
  let limit = most;
  for (const i of [...order].reverse()) {
    found[i] = Math.min(found[i], limit);
    limit = found[i] - gap;
  }
  return found;
}
