// Figures: a heading, a plot drawn by uPlot, what the cursor reads, and its data as CSV and PNG.
// A plot is drawn when it comes near the screen, and again when a choice of the page changes.

const FONT = '12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
// Distances between ticks: 1, 2 and 5 times a power of ten.
const ROUND = [...Array(61).keys()].flatMap((at) => [1, 2, 5].map((n) => n * 10 ** (at - 30)));
const WHOLE = ROUND.filter((step) => step > 0.9);
const paints = new Map(); // of every figure on the page: its canvas -> what draws it again

function repaint() {
  for (const paint of paints.values()) paint();
}
for (const query of ["(prefers-color-scheme: dark)", "print"])
  matchMedia(query).addEventListener("change", repaint);

// A colour of the style sheet; `alpha` in two hexadecimal digits.
function ink(name, alpha = "") {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim() + alpha;
}

function tickText(value, step) {
  const size = Math.abs(value);
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  let text = value.toFixed(Math.min(digits, 20));
  if (size >= 1e6) text = `${Number((value / 1e6).toPrecision(4))}M`;
  else if (size >= 1e4) text = `${Number((value / 1e3).toPrecision(4))}k`;
  else if (digits > 5) text = value === 0 ? "0" : value.toExponential(1);
  return (Number(text) === 0 ? text.replace("-", "") : text).replaceAll("-", "\u2212");
}

// The range of a vertical axis with a little air; never empty. `also`: values it must reach.
function rangeOf(low, high, { zero = false, limits = null, also = [] } = {}) {
  if (limits) return limits;
  if (low === null) return [0, 1];
  low = Math.min(low, ...also, ...(zero ? [0] : []));
  high = Math.max(high, ...also, ...(zero ? [0] : []));
  const air = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.1 || 1;
  return [zero && low === 0 ? 0 : low - air, high + air];
}

function axis(more) {
  const [muted, hair] = [() => ink("--muted"), () => ink("--hair")];
  const lines = { stroke: hair, width: 1 };
  return { stroke: muted, font: FONT, labelFont: FONT, grid: lines, ticks: { show: false }, ...more };
}

// The options of uPlot that all plots share. `spec` is what a figure's `build` returns:
//   data, series, bands   as uPlot takes them, series without the one of x
//   range(low, high)      of the vertical axis; log: it is logarithmic
//   x, y                  more options of the axes; xRange, for x that is no optimizer step
//   under, over           draw on the canvas before and after the series
//   read(place), summary  what is read at a place; places, at(u) and where(place) if not x's points
//   rest                  whether the last place is read while there is no cursor
//   table()               rows for CSV
function optionsOf(spec, width, height, told) {
  const steps = !spec.xRange;
  const line = { stroke: () => ink("--axis"), width: 1 };
  return {
    width,
    height,
    legend: { show: false },
    series: [{}, ...spec.series],
    bands: spec.bands ?? [],
    scales: {
      x: { time: false, range: (u, low, high) => spec.xRange ?? stepRange(low, high) },
      y: spec.log
        ? { distr: 3, range: (u, low, high) => uPlot.rangeLog(low, high, 10, false) }
        : { range: (u, low, high) => spec.range(low, high) },
    },
    axes: [
      axis({
        grid: { show: false },
        ticks: { ...line, size: 4 },
        border: { show: true, ...line },
        gap: 3,
        space: 56,
        size: 26,
        labelSize: 18,
        label: steps ? "optimizer step" : "",
        values: (u, splits, at, space, step) => splits.map((value) => tickText(value, step)),
        ...(steps ? { incrs: WHOLE } : {}),
        ...spec.x,
      }),
      axis({
        gap: 6,
        space: 30,
        incrs: ROUND,
        values: (u, splits, at, space, step) =>
          splits.map((value) =>
            value === null ? null : spec.log ? shown(value) : tickText(value, step),
          ),
        size: (u, texts, at, cycle) =>
          cycle > 1 ? u.axes[at]._size : 12 + 7 * Math.max(1, ...(texts ?? []).map(lengthOf)),
        ...spec.y,
      }),
    ],
    cursor: {
      y: Boolean(spec.at),
      points: { show: false },
      drag: { x: steps, y: false, setScale: false },
      bind: steps ? { dblclick: () => () => zoomTo(null) } : {},
    },
    hooks: {
      drawAxes: [(u) => spec.under?.(u, u.ctx)],
      draw: [(u) => spec.over?.(u, u.ctx)],
      setCursor: [told],
      // later: zooming replaces the plot, which is still handling the end of this drag
      setSelect: [(u) => setTimeout(selected, 0, u)],
    },
  };
}

function lengthOf(text) {
  return String(text ?? "").length;
}

function stepRange(low, high) {
  if (view.zoom) return view.zoom;
  return low === high ? [low - 1, high + 1] : [low, high];
}

function selected(u) {
  const { left, width } = u.select;
  if (width > 3) zoomTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
}

// Shows these steps in every figure over steps; null shows all.
function zoomTo(steps) {
  view.zoom = steps && steps[1] - steps[0] >= 1 ? steps.map(Math.round) : null;
  view.zoomed();
  repaint();
}

function figure(asked) {
  const { title, unit = "", note: caption = "", wide, legend = null, height = 250, build } = asked;
  const canvas = html("div", {
    class: "canvas",
    tabindex: "0",
    role: "group",
    "aria-label": `${title}: arrow keys read values`,
  });
  canvas.style.minHeight = `${height}px`;
  const readout = html("p", { class: "readout" });
  const name = title.replace(/[^\w@+-]+/g, "_").toLowerCase();
  const saving = (kind, save) =>
    button(kind, save, { class: "save", "aria-label": `${title}: save as ${kind}` });
  let [plot, spec, place, begun] = [null, null, -1, false];
  const told = (u) => {
    const found = !(u.cursor.left >= 0) ? null : spec.at ? spec.at(u) : u.cursor.idx;
    place = found ?? -1;
    const reading = found ?? (spec.rest ? u.series[0].idxs[1] : null);
    readout.replaceChildren(reading === null ? "" : spec.read(reading));
  };
  const paint = () => {
    begun = true;
    plot?.destroy();
    [plot, spec, place] = [null, build(), -1];
    readout.replaceChildren();
    if (!spec) {
      canvas.replaceChildren(note("Every arm that has it is hidden."));
      return;
    }
    canvas.replaceChildren();
    plot = new uPlot(optionsOf(spec, canvas.clientWidth, height, told), spec.data, canvas);
    plot.root.setAttribute("role", "img");
    const label = `${title}${unit ? `, ${unit}` : ""}. ${spec.summary}`;
    plot.root.setAttribute("aria-label", label);
    told(plot);
  };
  canvas.addEventListener("pointermove", () => readout.setAttribute("aria-live", "off"));
  canvas.addEventListener("keydown", (event) => {
    if (!plot) return;
    const [first, last] = spec.at ? [0, spec.places - 1] : plot.series[0].idxs;
    const row = spec.row ?? 10;
    const to = {
      ArrowRight: place < 0 ? first : place + 1,
      ArrowLeft: place < 0 ? last : place - 1,
      Home: first,
      End: last,
      PageDown: place + row,
      PageUp: place - row,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    readout.setAttribute("aria-live", "polite");
    const next = Math.max(first, Math.min(last, to));
    const [x, y] = spec.where?.(next) ?? [plot.data[0][next], null];
    const top = y === null ? 0 : plot.valToPos(y, "y");
    plot.setCursor({ left: plot.valToPos(x, "x"), top });
  });
  paints.set(canvas, () => begun && paint());
  begin.set(canvas, (again) => (again || !begun) && paint());
  ends.set(canvas, () => plot?.destroy());
  nearby.observe(canvas);
  return html(
    "figure",
    { class: wide ? "wide-figure" : "" },
    html(
      "div",
      { class: "figure-head" },
      // a long name of a metric breaks after its parts
      html("h3", {}, visible(title).split(/(?<=[_/])/).flatMap((part) => [part, html("wbr")])),
      saving("CSV", () => spec && saveBlob(`${name}.csv`, new Blob([csvOf(spec.table())]))),
      saving("PNG", () => plot && savePicture(`${name}.png`, title, unit, plot, legend)),
    ),
    unit ? html("p", { class: "unit" }, unit) : null,
    canvas,
    readout,
    legend,
    caption ? html("figcaption", {}, caption) : null,
  );
}

// What comes near the screen is drawn, and drawn again when its width has changed.
const begin = new WeakMap();
const ends = new WeakMap();
const widths = new WeakMap();
const nearby = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      nearby.unobserve(target);
      sized.observe(target);
    }
  },
  { rootMargin: "600px" },
);
const sized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (!target.clientWidth || widths.get(target) === target.clientWidth) continue;
    widths.set(target, target.clientWidth);
    begin.get(target)(true);
  }
});
addEventListener("beforeprint", () => {
  for (const canvas of paints.keys()) begin.get(canvas)(false);
});

// To be called before figures are taken off the page.
function forget(holder) {
  for (const canvas of holder.querySelectorAll(".canvas")) {
    ends.get(canvas)?.();
    paints.delete(canvas);
    nearby.unobserve(canvas);
    sized.unobserve(canvas);
  }
}

function saveBlob(name, blob) {
  const url = URL.createObjectURL(blob);
  html("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function csvOf(rows) {
  const cell = (value) => {
    const text = String(value ?? "");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => `${row.map(cell).join(",")}\n`).join("");
}

// The plot as it is on the screen, with its title and the names of what is drawn.
function savePicture(name, title, unit, plot, legend) {
  const from = plot.ctx.canvas;
  const scale = devicePixelRatio;
  const filled = [...(legend?.querySelectorAll("[data-fill]") ?? [])];
  const entries = filled.length
    ? filled.map((each) => [each.dataset.fill, each.textContent])
    : data.arms
        .map((arm, at) => [penOf(at).colour, arm.name])
        .filter(([, arm]) => !view.hidden.has(arm));
  const [head, row] = [48, 20];
  const picture = html("canvas", {
    width: from.width,
    height: from.height + (head + row * entries.length + 8) * scale,
  });
  const to = picture.getContext("2d");
  to.fillStyle = ink("--paper");
  to.fillRect(0, 0, picture.width, picture.height);
  to.drawImage(from, 0, head * scale);
  to.scale(scale, scale);
  const write = (text, x, y, colour, font) => {
    to.fillStyle = ink(colour);
    to.font = font;
    to.fillText(text, x, y);
  };
  write(title, 10, 20, "--ink", FONT.replace("12px", "bold 15px"));
  write(unit, 10, 38, "--muted", FONT);
  entries.forEach(([colour, text], at) => {
    const y = head + from.height / scale + row * at;
    to.fillStyle = ink(colour);
    to.fillRect(10, y + 3, 14, 8);
    write(text, 32, y + 12, "--ink", FONT);
  });
  picture.toBlob((blob) => saveBlob(name, blob));
}
