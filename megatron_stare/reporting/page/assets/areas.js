// Stacked areas, scatter plots, bars and heat maps.

const LAYERS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((place) => `--layer-${place}`);

function key(entries) {
  const patch = (fill, strong) =>
    svg(
      "svg",
      { class: "patch", viewBox: "0 0 12 12", "aria-hidden": "true" },
      svg("rect", { width: 12, height: 12, class: strong, fill: `var(${fill})` }),
    );
  return html(
    "ul",
    { class: "key" },
    entries.map(([fill, text, strong]) =>
      html("li", { "data-fill": fill }, patch(fill, strong), visible(text)),
    ),
  );
}

// `at` in bold, then name and value of each.
function readings(at, pairs) {
  return html(
    "span",
    {},
    html("b", {}, at),
    pairs.map(([name, value]) =>
      html("span", { class: "reading" }, `${visible(name)} `, html("b", {}, shown(value))),
    ),
  );
}

// Layers that add up, over steps.
function stackFigure({ title, unit, note, stack, limits = null, fills = LAYERS }) {
  const names = Object.keys(stack.layers);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const means = names.map((name) => Number(mean(stack.layers[name]).toPrecision(3)));
  const texts = names.map((name, at) => `${name}: ${shown(means[at])} on average`);
  // an area needs two places
  const wide = (values) => (stack.x.length > 1 ? values : [values[0], values[0]]);
  const xs = stack.x.length > 1 ? stack.x : [stack.x[0] - 0.5, stack.x[0] + 0.5];
  const edges = [xs.map(() => 0)];
  for (const name of names)
    edges.push(wide(stack.layers[name]).map((value, at) => value + edges.at(-1)[at]));
  return figure({
    title,
    unit,
    note,
    legend: key(texts.map((text, at) => [fills[at % fills.length], text])),
    build: () => ({
      data: [xs, ...edges],
      series: edges.map(() => ({ stroke: () => ink("--paper"), width: 1, points: { show: false } })),
      bands: names.map((_, at) => ({
        series: [at + 2, at + 1],
        fill: () => ink(fills[at % fills.length]),
      })),
      range: (low, high) => rangeOf(low, high, { zero: true, limits }),
      read: (at) =>
        readings(
          shown(Number(stack.x[Math.min(at, stack.x.length - 1)].toFixed(1))),
          names.map((name) => [name, Number(wide(stack.layers[name])[at].toPrecision(3))]),
        ),
      summary: texts.join("; "),
      table: () => [
        ["step", ...names],
        ...stack.x.map((x, at) => [x, ...names.map((name) => stack.layers[name][at])]),
      ],
    }),
  });
}

// Predicted against realised change, one dot per step, and the line through zero that fits best.
function scatterFigure(run, found) {
  const { colour } = penOf(data.runs[run].arm);
  const points = [...found.points].sort((one, other) => one[0] - other[0]);
  const [xs, ys] = [0, 1].map((part) => points.map((point) => point[part]));
  const every = found.every > 1 ? ` Every ${found.every}th step is drawn; r is of all.` : "";
  const r = found.correlation === null ? null : Number(found.correlation.toFixed(2));
  const fill = () => ink(colour, "80");
  return figure({
    title: `${runName(run)}: r = ${shown(r)}`,
    unit: "realised change [nats] over predicted change",
    note:
      `${counted(found.steps, "step")}; the same sign in ${shown(Math.round(found.same_sign * 100))}%. ` +
      `The line's slope, ${shown(found.slope)}, is the scale that the optimizer gives the prediction ` +
      `(${found.key}).${every}`,
    height: 280,
    legend: key([[colour, "one step"]]),
    build: () => ({
      data: [xs, ys],
      series: [{ paths: () => null, points: { show: true, size: 6, fill, stroke: fill } }],
      xRange: rangeOf(xs[0], xs.at(-1)),
      x: { label: "predicted, per unit step in the logits" },
      range: (low, high) => rangeOf(low, high),
      over: (u, ctx) => found.slope !== null && throughZero(u, ctx, found.slope),
      read: (at) => readings("", [["predicted", xs[at]], ["realised", ys[at]]]),
      summary: `Correlation ${shown(r)} over ${found.steps} steps`,
      table: () => [["predicted", "realised"], ...points],
    }),
  });
}

function throughZero(u, ctx, slope) {
  const { left, top, width, height } = u.bbox;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.strokeStyle = ink("--ink");
  ctx.lineWidth = 1.4 * devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  for (const x of [u.scales.x.min, u.scales.x.max])
    ctx.lineTo(u.valToPos(x, "x", true), u.valToPos(slope * x, "y", true));
  ctx.stroke();
  ctx.restore();
}

// Bars at bins, of one or two `groups` {name, values, fill, hollow}.
function barFigure({ title, unit, note, groups, labels, xLabel, height }) {
  const sides = groups.length > 1 ? [-1, 1] : [0];
  return figure({
    title,
    unit,
    note,
    height,
    legend: key(groups.map((group) => [group.fill, group.name, group.hollow && "hollow"])),
    build: () => ({
      data: [labels.map((_, at) => at + 0.5), ...groups.map((group) => group.values)],
      series: groups.map(({ fill, hollow }, at) => ({
        stroke: () => ink(fill),
        fill: () => ink(fill, hollow ? "40" : ""),
        width: 1,
        points: { show: false },
        fillTo: () => 0,
        paths: uPlot.paths.bars({ size: [0.84 / groups.length], align: sides[at] }),
      })),
      xRange: [0, labels.length],
      x: binAxis(labels, xLabel),
      range: (low, high) => rangeOf(low, high, { zero: true }),
      read: (at) => readings(labels[at].long, groups.map(({ name, values }) => [name, values[at]])),
      summary: `${labels.length} bins`,
      table: () => [
        [xLabel, ...groups.map(({ name }) => name)],
        ...labels.map(({ edge }, at) => [edge, ...groups.map(({ values }) => values[at])]),
      ],
    }),
  });
}

// Ticks at the edges of bins, as many as there is room for; the last bin has no upper end.
function binAxis(labels, label, room = 46) {
  const splits = (u, at, low, high, step, space) => {
    const size = at ? u.bbox.height : u.bbox.width;
    const most = Math.max(2, size / devicePixelRatio / room);
    const stride = Math.max(1, Math.ceil(labels.length / most));
    return [...labels.keys()].filter((place) => place % stride === 0);
  };
  return { label, splits, values: (u, places) => places.map((place) => labels[place].edge) };
}

function binLabels(edges, unit, open = true) {
  return edges.slice(0, -1).map((edge, at) => {
    const last = at === edges.length - 2;
    const upper = last && open ? "and more" : `to ${shown(edges[at + 1])}`;
    return { edge: shown(Number(edge.toPrecision(3))), long: `${shown(edge)} ${upper} ${unit}` };
  });
}

// cells[row][column]; `shade(value)` is its opacity; rows from the bottom up.
function heatFigure({ title, unit, note, cells, rows, columns, xLabel, shade, reads }) {
  const [wide, high] = [columns.length, rows.length];
  const clamp = (value, count) => Math.max(0, Math.min(count - 1, Math.floor(value)));
  const hex = (part) => Math.round(255 * part).toString(16).padStart(2, "0");
  return figure({
    title,
    unit,
    note,
    height: 280,
    build: () => ({
      data: [columns.map((_, at) => at), columns.map(() => null)],
      series: [{ points: { show: false } }],
      xRange: [0, wide],
      range: () => [0, high],
      x: binAxis(columns, xLabel),
      y: { ...binAxis(rows, null, 30), grid: { show: false } },
      over: (u, ctx) => {
        const [x, y] = [(at) => u.valToPos(at, "x", true), (at) => u.valToPos(at, "y", true)];
        cells.forEach((line, row) =>
          line.forEach((value, column) => {
            if (!value) return;
            ctx.fillStyle = ink("--ink-blue", hex(shade(value)));
            ctx.fillRect(x(column), y(row + 1), x(column + 1) - x(column), y(row) - y(row + 1));
          }),
        );
      },
      places: wide * high,
      row: wide,
      at: ({ cursor, posToVal }) =>
        clamp(posToVal(cursor.top, "y"), high) * wide + clamp(posToVal(cursor.left, "x"), wide),
      where: (place) => [(place % wide) + 0.5, Math.floor(place / wide) + 0.5],
      read: (place) => {
        const [row, column] = [Math.floor(place / wide), place % wide];
        return reads(row, column, cells[row][column]);
      },
      summary: `${high} by ${wide} cells`,
      table: () => [
        [`${unit} / ${xLabel}`, ...columns.map(({ edge }) => edge)],
        ...rows.map(({ edge }, row) => [edge, ...cells[row]]),
      ],
    }),
  });
}
