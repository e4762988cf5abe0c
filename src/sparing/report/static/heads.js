// Pictures of where a head looks, exactly and by each method.

function blend(from, to, share) {
  const part = (hex, i) => parseInt(hex.slice(1 + 2 * i, 3 + 2 * i), 16);
  return [0, 1, 2].map((i) => Math.round(part(from, i) * (1 - share) + part(to, i) * share));
}

// `most` has the last of the colours; what is above it, too.
function paint(canvas, { side, pixels }, most, [none, some, all]) {
  const bytes = atob(pixels), context = canvas.getContext("2d"), image = context.createImageData(side, side);
  for (let i = 0; i < side * side; i++) {
    const weight = Math.min(bytes.charCodeAt(i) / most, 1);
    const mixed = weight < 0.5 ? blend(none, some, 2 * weight) : blend(some, all, 2 * weight - 1);
    image.data.set([...mixed, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
}

function picture(map, name, most, colours) {
  const label = `where ${map.method} looks: ${name}`, size = { width: map.side, height: map.side };
  const canvas = element("canvas", { ...size, role: "img", "aria-label": label });
  paint(canvas, map, most, colours);
  const known = map.error === null ? "" : `error ${Number(map.error.toPrecision(2))}`;
  const note = element("small", {}, map.method === "exact" ? "the model's own attention" : known);
  return element("figure", {}, canvas, element("figcaption", {}, code(map.method), note));
}

function drawHeads(choice, container) {
  choice.append(...DATA.heads.map(({ name, layer }, i) => element("option", { value: i }, `${name} (${layer})`)));
  const draw = () => {
    const { name, maps } = DATA.heads[choice.value], colours = ["map-none", "map-some", "map-all"].map(colour);
    const most = Math.max(...Array.from(atob(maps[0].pixels), (byte) => byte.charCodeAt(0)), 1);
    container.replaceChildren(...maps.map((map) => picture(map, name, most, colours)));
  };
  choice.addEventListener("change", draw);
  redraws.push(draw);
  draw();
}

if (document.getElementById("head")) drawHeads(document.getElementById("head"), document.getElementById("maps"));
