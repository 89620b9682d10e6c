// Lines over steps: one per run, the mean of seeds with its interval, extremes of buckets as bands.

// The lines of a metric that are not hidden.
function linesOf(key, label, dashed) {
  const found = data.lines[key];
  if (!found) return [];
  const lines = [];
  found.runs.forEach((line, run) => {
    const arm = data.runs[run].arm;
    if (!line || view.hidden.has(data.arms[arm].name)) return;
    const thin = data.arms[arm].name in found.means;
    lines.push(lineFrom(line, arm, runName(run), label, dashed, thin));
  });
  for (const [name, line] of Object.entries(found.means)) {
    const arm = data.arms.findIndex((each) => each.name === name);
    if (!view.hidden.has(name))
      lines.push(lineFrom(line, arm, `${name}, mean`, label, dashed, false));
  }
  return lines;
}

function lineFrom([x, y, low, high], arm, name, label, dashed, thin) {
  const pen = penOf(arm);
  const dash = dashed ? "3 2" : pen.dash;
  return { x, y, low, high, name, label, thin, colour: pen.colour, dash };
}

function pathOf(xs, ys, axes) {
  return xs
    .map((value, at) => `${at ? "L" : "M"}${axes.x(value).toFixed(1)} ${axes.y(ys[at]).toFixed(1)}`)
    .join("");
}

function bandOf(line, axes) {
  const back = [...line.x.keys()].reverse();
  const upper = pathOf(line.x, line.high, axes);
  const lower = back
    .map((at) => `L${axes.x(line.x[at]).toFixed(1)} ${axes.y(line.low[at]).toFixed(1)}`)
    .join("");
  return `${upper}${lower}Z`;
}

// The place in ascending xs that is nearest to x.
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

function bound(values, start, better) {
  return values.reduce((found, value) => (better(value, found) ? value : found), start);
}

// One set of axes for the lines that `lines()` gives.
function drawLines(
  width,
  lines,
  { zero, limits, rule = null, bands = [], height = 260, ends = false, xLabel, whole = true },
) {
  if (!lines.length) return null;
  const values = lines.flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])]);
  if (rule !== null) values.push(rule);
  for (const band of bands) values.push(band[1], band[2]);
  const ys = rangeOf(values, { zero, limits });
  const first = bound(
    lines.map((line) => line.x[0]),
    Infinity,
    (a, b) => a < b,
  );
  const last = bound(
    lines.map((line) => line.x[line.x.length - 1]),
    -Infinity,
    (a, b) => a > b,
  );
  const xs = first === last ? [first - 1, last + 1] : [first, last];
  const inner = width - (ends ? 40 : 0);
  const axes = axesOf(inner, height, xs, ys, {
    xLabel,
    xTicks: whole ? stepTicks(xs[0], xs[1], inner - 60) : null,
  });
  axes.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  for (const [target, low, high] of bands) {
    axes.root.append(
      svg("rect", {
        class: "target-band",
        x: axes.left,
        width: axes.right - axes.left,
        y: axes.y(high),
        height: axes.y(low) - axes.y(high),
      }),
      svg("line", {
        class: "rule",
        x1: axes.left,
        x2: axes.right,
        y1: axes.y(target),
        y2: axes.y(target),
      }),
    );
  }
  if (rule !== null) {
    axes.root.append(
      svg("line", {
        class: "rule",
        x1: axes.left,
        x2: axes.right,
        y1: axes.y(rule),
        y2: axes.y(rule),
      }),
    );
  }
  for (const line of lines) {
    if (line.low)
      axes.root.append(svg("path", { class: "band", d: bandOf(line, axes), fill: line.colour }));
  }
  for (const line of lines) axes.root.append(...strokes(line, axes));
  if (ends) axes.root.append(...endLabels(lines, axes));
  return {
    ...axes,
    width,
    cursor: cursorOf(lines, axes),
    summary: lines
      .map((line) => `${tagOf(line)} ends at ${shown(line.y[line.y.length - 1])}`)
      .join("; "),
  };
}

function strokes(line, axes) {
  const style = {
    stroke: line.colour,
    "stroke-dasharray": line.dash,
    class: line.thin ? "line thin" : "line",
  };
  const marks = [svg("path", { d: pathOf(line.x, line.y, axes), ...style })];
  if (line.x.length <= 24) {
    for (const [at, x] of line.x.entries()) {
      marks.push(
        svg("circle", {
          cx: axes.x(x),
          cy: axes.y(line.y[at]),
          r: line.thin ? 1.5 : 3,
          fill: line.colour,
        }),
      );
    }
  }
  return marks;
}

// Where a figure has several metrics, each is named at its end; labels that would touch are moved.
function endLabels(lines, axes) {
  const labels = new Map();
  for (const line of lines) {
    if (line.label && !labels.has(line.label))
      labels.set(line.label, axes.y(line.y[line.y.length - 1]));
  }
  let above = -Infinity;
  return [...labels]
    .sort((one, other) => one[1] - other[1])
    .map(([text, y]) => {
      above = Math.max(y, above + 14);
      return svg("text", { x: axes.right + 5, y: above + 4, class: "end-label" }, text);
    });
}

function tagOf(line) {
  return [line.name, line.label].filter(Boolean).join(" ");
}

// Reads all lines at one step.
function cursorOf(lines, axes) {
  const all = [...new Set(lines.flatMap((line) => line.x))].sort((one, other) => one - other);
  return {
    places: all.length,
    near: (x) =>
      nearest(
        all,
        axes.xs[0] + ((x - axes.left) / (axes.right - axes.left)) * (axes.xs[1] - axes.xs[0]),
      ),
    at: (number) => ({ x: axes.x(all[number]), text: readingOf(lines, all[number]) }),
  };
}

function readingOf(lines, x) {
  const read = html("span", {}, html("b", {}, shown(Number(x.toFixed(1)))));
  const thick = lines.filter((line) => !line.thin);
  for (const line of thick.length > 6 ? thick.slice(0, 6) : thick) {
    const at = nearest(line.x, x);
    const extremes = line.low ? ` (${shown(line.low[at])} to ${shown(line.high[at])})` : "";
    read.append(
      html(
        "span",
        { class: "reading" },
        swatch(line),
        `${tagOf(line)} `,
        html("b", {}, shown(line.y[at])),
        extremes,
      ),
    );
  }
  if (thick.length > 6)
    read.append(html("span", { class: "reading" }, `and ${thick.length - 6} more`));
  return read;
}

// A figure of FIGURES: its metrics, one or several, of all arms.
function lineFigure(spec) {
  const entries = Object.entries(spec.keys).filter(([key]) => data.lines[key]);
  const ends = entries.length > 1;
  return figure({
    title: spec.title,
    unit: spec.unit,
    note: spec.note,
    wide: spec.name === "entropy",
    draw: (width) =>
      drawLines(
        width,
        entries.flatMap(([key, label], at) => linesOf(key, ends ? label : "", at > 0)),
        {
          zero: spec.zero,
          limits: spec.limits,
          rule: spec.rule,
          ends: ends && entries.some(([, label]) => label.length < 7),
          bands: spec.name === "entropy" ? data.bands : [],
          height: spec.name === "entropy" ? 340 : 250,
        },
      ),
  });
}
