// Axes: scales, round ticks, a frame that is drawn again when its width changes, and a cursor that
// follows the pointer or the arrow keys.

const drawings = new Set(); // what to draw again when an arm is shown or hidden

// Round ticks over [low, high]: steps of 1, 2 or 5 times a power of ten.
function ticksOf(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= raw * 0.999);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-6); at * step <= high + step * 1e-6; at += 1) {
    ticks.push(at * step);
  }
  return { ticks, step, text: (value) => tickText(value, digits) };
}

function tickText(value, digits) {
  const size = Math.abs(value);
  let text;
  if (size >= 1e6) text = `${Number((value / 1e6).toPrecision(4))}M`;
  else if (size >= 1e4) text = `${Number((value / 1e3).toPrecision(4))}k`;
  else if (digits > 5) text = value === 0 ? "0" : value.toExponential(1);
  else text = value.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replaceAll("-", "\u2212");
}

// The range of the values with a little air; never empty.
function rangeOf(values, { zero = false, limits = null } = {}) {
  if (limits) return [limits[0], limits[1]];
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (zero) {
    low = Math.min(0, low);
    high = Math.max(0, high);
  }
  const air = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.1 || 1;
  return [zero && low === 0 ? 0 : low - air, high + air];
}

// The frame of a plot: {root, left, right, top, bottom, x(value), y(value)}.
function axesOf(
  width,
  height,
  xs,
  ys,
  { xLabel = "optimizer step", xTicks = null, yTicks = null } = {},
) {
  const vertical = yTicks ?? ticksOf(ys[0], ys[1], height / 44);
  const labels = vertical.ticks.map(vertical.text);
  const left = 12 + 7 * Math.max(1, ...labels.map((text) => text.length));
  const [right, top, bottom] = [width - 14, 10, height - (xLabel ? 40 : 24)];
  const x = (value) => left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (right - left);
  const y = (value) => bottom - ((value - ys[0]) / (ys[1] - ys[0] || 1)) * (bottom - top);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot" });
  const horizontal = xTicks ?? ticksOf(xs[0], xs[1], Math.max(2, (right - left) / 90));
  vertical.ticks.forEach((value, at) => {
    root.append(
      svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, labels[at]),
    );
  });
  root.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const value of horizontal.ticks) {
    const place = x(value);
    const room = Math.min(place, width - place);
    root.append(
      svg("line", { class: "axis", x1: place, x2: place, y1: bottom, y2: bottom + 4 }),
      svg(
        "text",
        {
          x: room < 12 ? width - 2 : place,
          y: bottom + 18,
          "text-anchor": room < 12 ? "end" : "middle",
        },
        horizontal.text(value),
      ),
    );
  }
  if (xLabel) {
    root.append(
      svg("text", { x: right, y: height - 4, "text-anchor": "end", class: "unit" }, xLabel),
    );
  }
  return { root, left, right, top, bottom, x, y, xs, ys };
}

// Whole steps only: no tick between two of them.
function stepTicks(low, high, width) {
  const found = ticksOf(low, high, Math.max(2, width / 90));
  if (found.step >= 1) return found;
  const ticks = [];
  for (let at = Math.ceil(low); at <= high; at += 1) ticks.push(at);
  return { ticks, step: 1, text: (value) => String(value) };
}

// A figure with a heading; `draw(width)` gives {root, cursor, summary} or null where nothing is
// shown. `cursor` is {places, at(number) -> {text, x}}: what the arrow keys and the pointer read.
function figure({ title, unit = "", note = "", draw, wide = false, legend = null }) {
  const canvas = html("div", { class: "canvas", tabindex: "0" });
  const readout = html("p", { class: "readout", "aria-live": "polite" }, "");
  const node = html(
    "figure",
    { class: wide ? "wide-figure" : "" },
    html("h3", {}, title),
    unit ? html("p", { class: "unit" }, unit) : null,
    canvas,
    readout,
    legend,
    note ? html("figcaption", {}, note) : null,
  );
  let now = null;
  let place = -1;
  const read = (number, loud) => {
    if (!now?.cursor || !now.cursor.places) return;
    place = Math.max(0, Math.min(now.cursor.places - 1, number));
    const found = now.cursor.at(place);
    readout.setAttribute("aria-live", loud ? "polite" : "off");
    readout.replaceChildren(found.text);
    now.mark?.remove();
    now.mark =
      found.mark ??
      svg("line", {
        class: "cursor",
        x1: found.x,
        x2: found.x,
        y1: now.top,
        y2: now.bottom,
      });
    now.root.append(now.mark);
  };
  const paint = () => {
    const width = Math.floor(canvas.clientWidth);
    if (!width) return;
    const drawn = draw(width);
    if (drawn === null) {
      now = null;
      canvas.replaceChildren(html("p", { class: "note" }, "Every arm that has it is hidden."));
      return;
    }
    now = drawn;
    now.root.setAttribute("role", "img");
    now.root.setAttribute("aria-label", `${title}${unit ? `, ${unit}` : ""}. ${now.summary ?? ""}`);
    canvas.replaceChildren(now.root);
    place = -1;
    readout.replaceChildren(now.hint ?? "");
  };
  canvas.setAttribute("role", "group");
  canvas.setAttribute("aria-label", `${title}: arrow keys read values`);
  canvas.addEventListener("pointermove", (event) => {
    if (!now?.cursor) return;
    const box = now.root.getBoundingClientRect();
    const scale = now.width / box.width;
    read(
      now.cursor.near((event.clientX - box.left) * scale, (event.clientY - box.top) * scale),
      false,
    );
  });
  canvas.addEventListener("pointerleave", () => {
    now?.mark?.remove();
    readout.replaceChildren(now?.hint ?? "");
  });
  canvas.addEventListener("keydown", (event) => {
    const last = (now?.cursor?.places ?? 0) - 1;
    const row = now?.cursor?.row ?? 10;
    const to = {
      ArrowRight: place + 1,
      ArrowLeft: place < 0 ? last : place - 1,
      Home: 0,
      End: last,
      PageDown: place + row,
      PageUp: place - row,
    }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    read(to, true);
  });
  observer.observe(canvas);
  painters.set(canvas, paint);
  drawings.add(paint);
  return node;
}

const painters = new WeakMap();
const widths = new WeakMap();
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (widths.get(target) === target.clientWidth) continue;
    widths.set(target, target.clientWidth);
    painters.get(target)?.();
  }
});
