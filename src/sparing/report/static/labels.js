// Names beside points: as many as have room, the important ones first.

const PLACES = [
  ["top right", 1, -1], ["bottom right", 1, 1], ["top left", -1, -1], ["bottom left", -1, 1],
  ["middle right", 1, 0], ["middle left", -1, 0],
];
const LETTER = 6.5, TALL = 14, GAP = 6; // pixels, of a font of `SMALL`

// labels: {x, y, text} in pixels; taken: boxes [left, top, right, bottom]. Gives each its place, null without room.
function placeLabels(labels, taken, width, height) {
  const used = [...taken];
  return labels.map((label) => {
    for (const [place, side, up] of PLACES) {
      const box = labelBox(label, side, up);
      const inside = box[0] >= 0 && box[1] >= 0 && box[2] <= width && box[3] <= height;
      if (inside && !used.some((other) => overlap(box, other))) {
        used.push(box);
        return place;
      }
    }
    return null;
  });
}

function labelBox({ x, y, text }, side, up) {
  const wide = text.length * LETTER, middle = y + up * (GAP + TALL / 2);
  const left = side < 0 ? x - GAP - 1 - wide : x + GAP + 1;
  return [left, middle - TALL / 2, left + wide, middle + TALL / 2];
}

function overlap(a, b) {
  return a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
}
