// Stacked areas, scatter plots, bars and heat maps.

const LAYERS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((place) => `var(--layer-${place})`);

function key(entries) {
  return html(
    "ul",
    { class: "key" },
    entries.map(([fill, text, strong]) =>
      html(
        "li",
        {},
        svg(
          "svg",
          { class: "patch", viewBox: "0 0 12 12", "aria-hidden": "true" },
          svg("rect", {
            width: 12,
            height: 12,
            class: strong,
            fill,
            stroke: strong ? fill : null,
          }),
        ),
        text,
      ),
    ),
  );
}

// Layers that add up, over steps. The largest is named in the key with its mean.
function stackFigure({ title, unit, note, stack, limits, fills = LAYERS }) {
  const names = Object.keys(stack.layers);
  const means = names.map(
    (name) => stack.layers[name].reduce((sum, value) => sum + value, 0) / stack.x.length,
  );
  const order = [...names.keys()];
  return figure({
    title,
    unit,
    note,
    legend: key(
      order.map((at) => [
        fills[at % fills.length],
        `${names[at]}: ${shown(Number(means[at].toPrecision(3)))} on average`,
      ]),
    ),
    draw: (width) => drawStack(width, stack, names, limits, fills, means),
  });
}

function drawStack(width, stack, names, limits, fills, means) {
  const sums = stack.x.map(() => 0);
  const edges = [sums.slice()];
  for (const name of names) {
    stack.layers[name].forEach((value, at) => {
      sums[at] += value;
    });
    edges.push(sums.slice());
  }
  const single = stack.x.length === 1;
  const xs = single ? [stack.x[0] - 1, stack.x[0] + 1] : [stack.x[0], stack.x[stack.x.length - 1]];
  const axes = axesOf(width, 250, xs, rangeOf(sums, { zero: true, limits }), {
    xTicks: stepTicks(xs[0], xs[1], width - 60),
  });
  const places = single ? xs : stack.x;
  names.forEach((name, layer) => {
    const value = (level, at) => edges[level][single ? 0 : at];
    const upper = places.map(
      (x, at) =>
        `${at ? "L" : "M"}${axes.x(x).toFixed(1)} ${axes.y(value(layer + 1, at)).toFixed(1)}`,
    );
    const lower = places
      .map((x, at) => `L${axes.x(x).toFixed(1)} ${axes.y(value(layer, at)).toFixed(1)}`)
      .reverse();
    axes.root.append(
      svg("path", {
        d: `${upper.join("")}${lower.join("")}Z`,
        fill: fills[layer % fills.length],
        class: "layer",
      }),
    );
  });
  if (!single)
    axes.root.append(
      ...names
        .map((name, layer) => layerLabel(name, stack.x, edges[layer], edges[layer + 1], axes))
        .filter(Boolean),
    );
  const near = (x) =>
    nearest(stack.x, xs[0] + ((x - axes.left) / (axes.right - axes.left)) * (xs[1] - xs[0]));
  const at = (number) => ({
    x: axes.x(stack.x[number]),
    text: html(
      "span",
      {},
      html("b", {}, shown(Number(stack.x[number].toFixed(1)))),
      names.map((name) =>
        html(
          "span",
          { class: "reading" },
          `${name} `,
          html("b", {}, shown(Number(stack.layers[name][number].toPrecision(3)))),
        ),
      ),
    ),
  });
  const summary = names
    .map((name, layer) => `${name}: ${shown(Number(means[layer].toPrecision(3)))} on average`)
    .join("; ");
  return { ...axes, width, summary, cursor: { places: stack.x.length, near, at } };
}

// A layer is named where it is thickest, if there is room.
function layerLabel(name, xs, lower, upper, axes) {
  const room = 3.4 * name.length;
  let best = -1;
  let most = 15;
  xs.forEach((x, at) => {
    const thick = axes.y(lower[at]) - axes.y(upper[at]);
    if (thick > most && axes.x(x) > axes.left + room && axes.x(x) < axes.right - room)
      [best, most] = [at, thick];
  });
  if (best < 0) return null;
  const y = (axes.y(lower[best]) + axes.y(upper[best])) / 2 + 4;
  return svg(
    "text",
    { x: axes.x(xs[best]), y, "text-anchor": "middle", class: "layer-label" },
    name,
  );
}

// Predicted against realised change, one dot per step, and the line through zero that fits best.
function scatterFigure(run, found) {
  const pen = penOf(data.runs[run].arm);
  const r = found.correlation;
  const every = found.every > 1 ? ` Every ${found.every}th step is drawn; r is of all.` : "";
  return figure({
    title: `${runName(run)}: r = ${shown(r === null ? null : Number(r.toFixed(2)))}`,
    unit: "realised change [nats] over predicted change",
    note:
      `${counted(found.steps, "step")}; the same sign in ${shown(Math.round(found.same_sign * 100))}%. ` +
      `The line's slope, ${shown(found.slope)}, is the scale that the optimizer gives the prediction ` +
      `(${found.key}).${every}`,
    draw: (width) => {
      const xs = rangeOf(found.points.map(([x]) => x));
      const ys = rangeOf(found.points.map(([, y]) => y));
      const axes = axesOf(width, 280, xs, ys, { xLabel: "predicted, per unit step in the logits" });
      for (const [x, y] of found.points) {
        axes.root.append(
          svg("circle", {
            cx: axes.x(x).toFixed(1),
            cy: axes.y(y).toFixed(1),
            r: 2.5,
            fill: pen.colour,
            class: "dot",
          }),
        );
      }
      if (found.slope !== null) {
        // the line inside the frame
        const ends = xs.map((x) => [x, Math.max(ys[0], Math.min(ys[1], found.slope * x))]);
        const inside = ends.map(([x, y]) =>
          found.slope && y !== found.slope * x ? [y / found.slope, y] : [x, y],
        );
        axes.root.append(
          svg("path", {
            class: "rule strong",
            d: pathOf(
              inside.map(([x]) => x),
              inside.map(([, y]) => y),
              axes,
            ),
          }),
        );
      }
      return { ...axes, width, summary: `Correlation ${shown(r)} over ${found.steps} steps` };
    },
  });
}

// Bars beside one another at bins: `groups` are {name, values, fill, class}.
function barFigure({ title, unit, note, groups, labels, xLabel, height = 250 }) {
  return figure({
    title,
    unit,
    note,
    legend: key(groups.map((group) => [group.fill, group.name, group.class])),
    draw: (width) => {
      const ys = rangeOf(
        groups.flatMap((group) => group.values.map((value) => value ?? 0)),
        { zero: true },
      );
      const count = labels.length;
      const axes = axesOf(width, height, [0, count], ys, {
        xLabel,
        xTicks: binTicks(labels, width),
      });
      const slot = (axes.right - axes.left) / count;
      const each = (slot * 0.8) / groups.length;
      groups.forEach((group, number) =>
        group.values.forEach((value, at) => {
          if (!value) return;
          const [from, to] = [axes.y(Math.max(0, value)), axes.y(Math.min(0, value))];
          axes.root.append(
            svg("rect", {
              x: axes.left + at * slot + slot * 0.1 + number * each,
              y: from,
              width: Math.max(0.5, each - 1),
              height: Math.max(0.5, to - from),
              fill: group.fill,
              stroke: group.class ? group.fill : null,
              class: group.class,
            }),
          );
        }),
      );
      axes.root.append(
        svg("line", { class: "axis", x1: axes.left, x2: axes.right, y1: axes.y(0), y2: axes.y(0) }),
      );
      const at = (number) => ({
        x: axes.left + (number + 0.5) * slot,
        text: html(
          "span",
          {},
          html("b", {}, labels[number].long),
          groups.map((group) =>
            html(
              "span",
              { class: "reading" },
              `${group.name} `,
              html("b", {}, shown(group.values[number])),
            ),
          ),
        ),
      });
      const near = (x) => Math.floor((x - axes.left) / slot);
      return { ...axes, width, cursor: { places: count, near, at }, summary: `${count} bins` };
    },
  });
}

// Ticks at the edges of bins, as many as there is room for; the last bin has no upper end.
function binTicks(labels, width) {
  const stride = Math.max(1, Math.ceil(labels.length / Math.max(2, (width - 70) / 52)));
  const ticks = [...labels.keys()].filter((at) => at % stride === 0);
  return { ticks, text: (at) => labels[at].edge };
}

function binLabels(edges, unit, open = true) {
  return edges.slice(0, -1).map((edge, at) => {
    const last = at === edges.length - 2;
    const upper = last && open ? "and more" : `to ${shown(edges[at + 1])}`;
    return { edge: shown(Number(edge.toPrecision(3))), long: `${shown(edge)} ${upper} ${unit}` };
  });
}

// cells[row][column]; `shade(value)` is [fill, opacity]; rows from the bottom up.
function heatFigure({
  title,
  unit,
  note,
  cells,
  rows,
  columns,
  xLabel,
  shade,
  reads,
  height = 280,
}) {
  return figure({
    title,
    unit,
    note,
    draw: (width) => {
      const yTicks = {
        ticks: [...rows.keys()].filter((at) => at % Math.ceil(rows.length / 8) === 0),
        text: (at) => rows[at].edge,
      };
      const axes = axesOf(width, height, [0, columns.length], [0, rows.length], {
        xLabel,
        yTicks,
        xTicks: binTicks(columns, width),
      });
      const [wide, high] = [
        (axes.right - axes.left) / columns.length,
        (axes.bottom - axes.top) / rows.length,
      ];
      const frame = (row, column, attributes) =>
        svg("rect", {
          x: axes.left + column * wide,
          y: axes.bottom - (row + 1) * high,
          width: wide,
          height: high,
          ...attributes,
        });
      cells.forEach((line, row) =>
        line.forEach((value, column) => {
          if (!value) return;
          const [fill, opacity] = shade(value);
          axes.root.append(frame(row, column, { fill, "fill-opacity": opacity.toFixed(3) }));
        }),
      );
      const clamp = (value, count) => Math.max(0, Math.min(count - 1, Math.floor(value)));
      const cursor = {
        places: rows.length * columns.length,
        row: columns.length,
        near: (x, y) =>
          clamp((axes.bottom - y) / high, rows.length) * columns.length +
          clamp((x - axes.left) / wide, columns.length),
        at: (number) => {
          const [row, column] = [Math.floor(number / columns.length), number % columns.length];
          return {
            text: reads(row, column, cells[row][column]),
            mark: frame(row, column, { class: "cursor-cell" }),
          };
        },
      };
      return { ...axes, width, cursor, summary: `${rows.length} by ${columns.length} cells` };
    },
  });
}
