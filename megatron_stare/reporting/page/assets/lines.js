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
  const { colour, dash } = penOf(arm);
  const tag = label ? `${name} ${label}` : name;
  const curve = view.smoothing ? smoothed(y) : y;
  return { x, y, curve, low, high, thin, dash: dashed ? [3, 2] : dash, colour, tag };
}

// Exponential moving mean whose weights add up to one from the first point on.
function smoothed(values) {
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    sum = sum * view.smoothing + value * (1 - view.smoothing);
    weight = weight * view.smoothing + 1 - view.smoothing;
    return sum / weight;
  });
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

// uPlot's series of the lines, as columns next to one another: each line is [curve, low, high,
// raw], of which the last three are there if they are drawn.
function columnsOf(lines) {
  const columns = { tables: [], series: [], bands: [] };
  const unseen = { stroke: "transparent", points: { show: false } };
  for (const { x, y, curve, low, high, thin, dash, colour } of lines) {
    const stroke = () => ink(colour, thin ? "73" : "");
    const points = { show: x.length <= 24, size: thin ? 3 : 6, fill: stroke };
    const width = thin ? 1 : 2;
    const scaled = thin ? [] : dash.map((length) => length * devicePixelRatio);
    const table = [x, curve];
    columns.series.push({ stroke, width, dash: scaled, points });
    if (low) {
      table.push(low, high);
      const at = columns.series.push(unseen, unseen);
      columns.bands.push({ series: [at, at - 1], fill: () => ink(colour, "2b") });
    }
    if (view.smoothing) {
      table.push(y);
      columns.series.push({ stroke: () => ink(colour, "40"), width: 1, points: { show: false } });
    }
    columns.tables.push(table);
  }
  return columns;
}

function linePlot(lines, { zero, limits, rule, bands }) {
  if (!lines.length) return null;
  const { tables, series, bands: between } = columnsOf(lines);
  const joined = uPlot.join(tables);
  const positive = lines.every(({ y, low }) => [...y, ...(low ?? [])].every((value) => value > 0));
  const also = [...(rule === null ? [] : [rule]), ...bands.flatMap((band) => band.slice(1))];
  const log = view.log && positive;
  return {
    data: joined,
    series,
    bands: between,
    log,
    range: (low, high) => rangeOf(low, high, { zero, limits, also }),
    under: (u, ctx) => {
      for (const [target, low, high] of bands) {
        ctx.fillStyle = ink("--band");
        const [bottom, top] = [low, high].map((value) => u.valToPos(value, "y", true));
        ctx.fillRect(u.bbox.left, top, u.bbox.width, bottom - top);
        across(u, ctx, target);
      }
      if (rule !== null && (!log || rule > 0)) across(u, ctx, rule);
    },
    read: (at) => readingOf(lines, joined[0][at]),
    rest: true,
    summary: lines.map(({ tag, y }) => `${tag} ends at ${shown(y[y.length - 1])}`).join("; "),
    table: () => tableOf(lines),
  };
}

// A dashed line across the plot, inside of it.
function across(u, ctx, value) {
  const y = u.valToPos(value, "y", true);
  if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) return;
  ctx.save();
  ctx.strokeStyle = ink("--muted");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(u.bbox.left, y);
  ctx.lineTo(u.bbox.left + u.bbox.width, y);
  ctx.stroke();
  ctx.restore();
}

function tableOf(lines) {
  const parts = lines.flatMap(({ tag, x, y, low, high }) => [
    [tag, x, y],
    ...(low ? [[`${tag}, low`, x, low], [`${tag}, high`, x, high]] : []),
  ]);
  const [xs, ...columns] = uPlot.join(parts.map(([, x, values]) => [x, values]));
  return [
    ["step", ...parts.map(([name]) => name)],
    ...xs.map((x, at) => [x, ...columns.map((values) => values[at])]),
  ];
}

function readingOf(lines, x) {
  const read = html("span", {}, html("b", {}, shown(Number(x.toFixed(1)))));
  const thick = lines.filter((line) => !line.thin);
  for (const line of thick.slice(0, 6)) {
    const at = nearest(line.x, x);
    const extremes = line.low ? ` (${shown(line.low[at])} to ${shown(line.high[at])})` : "";
    const smooth = view.smoothing ? `, smoothed ${shown(Number(line.curve[at].toPrecision(4)))}` : "";
    const value = [html("b", {}, shown(line.y[at])), extremes, smooth];
    read.append(html("span", { class: "reading" }, swatch(line), `${visible(line.tag)} `, value));
  }
  if (thick.length > 6)
    read.append(html("span", { class: "reading" }, `and ${thick.length - 6} more`));
  return read;
}

// A figure of FIGURES: its metrics, one or two, of all arms. A second metric is dashed.
function lineFigure({ name, title, unit, note: caption, keys, zero, limits, rule }) {
  const entries = Object.entries(keys).filter(([key]) => data.lines[key]);
  const several = entries.length > 1;
  const large = name === "entropy";
  return figure({
    title,
    unit,
    note: caption,
    wide: large,
    height: large ? 340 : 250,
    legend: several ? note(`Dashed: ${entries.slice(1).map(([, label]) => label).join(", ")}.`) : null,
    build: () =>
      linePlot(
        entries.flatMap(([key, label], at) => linesOf(key, several ? label : "", at > 0)),
        { zero, limits, rule, bands: large ? data.bands : [] },
      ),
  });
}
