// What is inside a step: diagnostics of one step of one run, chosen by a slider.

const SIGNS = [
  { name: "A > 0", side: "positive", fill: "--rise" },
  { name: "A < 0", side: "negative", fill: "--fall", hollow: true },
];
const QUADRANT_NAMES = {
  positive_rising: "A > 0, g > 0",
  positive_falling: "A > 0, g < 0",
  negative_rising: "A < 0, g > 0",
  negative_falling: "A < 0, g < 0",
};
const TABLE_NAMES = {
  chosen_positive: "Tokens in L+ (weighted up)",
  chosen_negative: "Tokens in L\u2212 (weighted down)",
  rising: "Tokens with g > 0",
  falling: "Tokens with g < 0",
};
const PREDICTS = {
  objective: "of the whole loss",
  surprisal_part: "of the loss without its own term in H",
  weights: "of coefficient, weight and A g",
};
const NO_DIAGNOSTICS =
  "This run has no diagnostics. Train with diagnostics.interval=10 (any number of steps" +
  " above 0) and each 10th step is kept: bins, token tables and rollouts.";

function runsInside() {
  return [...data.runs.keys()].filter((run) => data.inside[run].steps.length);
}

function insideSection() {
  const runs = runsInside();
  if (!runs.length) return note(NO_DIAGNOSTICS);
  if (!runs.includes(view.insideRun)) [view.insideRun] = runs;
  const body = html("div", { class: "figures" });
  const chosen = controls();
  const output = html("output", { for: "inside-step" });
  const fill = () => {
    const { steps, recorded } = data.inside[view.insideRun];
    const last = steps.length - 1;
    const place = Math.min(view.insideStep ?? last, last);
    const text = `step ${steps[place].step}`;
    output.textContent = text;
    forget(body);
    body.replaceChildren(...stepFigures(steps[place]));
    return { place, last, text, left: recorded - steps.length };
  };
  const choose = () => {
    const { place, last, text, left } = fill();
    const oninput = ({ target }) => {
      view.insideStep = Number(target.value) === last ? null : Number(target.value);
      target.setAttribute("aria-valuetext", fill().text);
    };
    const range = { type: "range", min: 0, max: last, value: place, "aria-valuetext": text, oninput };
    const slider = field("inside-step", "Step", range);
    slider.classList.add("slider");
    slider.append(output);
    chosen.replaceChildren(
      runChooser("inside-run", runs, view.insideRun, (run) => {
        view.insideRun = run;
        choose();
      }),
      slider,
      left ? note(`${left} more steps have diagnostics; those shown are evenly spread.`) : "",
    );
  };
  choose();
  return [chosen, body];
}

function stepFigures(step) {
  return [
    changeBySurprisal(step),
    densityFigure(step),
    ...positionFigures(step),
    html("div", { class: "wide-figure" }, quadrantTable(step)),
    html("div", { class: "figures grid wide-figure" }, tokenTables(step)),
  ];
}

function changeBySurprisal(step) {
  const bins = step.surprisal_bins;
  return barFigure({
    title: "Predicted change of entropy by surprisal",
    unit: "per unit step in the logits",
    note:
      `First order, ${PREDICTS[step.predicts] ?? step.predicts}. In all ${shown(step.change)}; ` +
      `of the bare policy gradient ${shown(step.plain_change)}.`,
    labels: binLabels(bins.edges, "nats"),
    xLabel: "surprisal [nats], from",
    groups: SIGNS.map((sign) => ({ ...sign, values: bins[sign.side].change })),
  });
}

function densityFigure(step) {
  const { surprisal_edges: columns, advantage_edges: rows, count } = step.density;
  const cells = rows
    .slice(0, -1)
    .map((_, row) => columns.slice(0, -1).map((__, column) => count[column][row]));
  const most = Math.max(1, ...cells.flat());
  return heatFigure({
    title: "Tokens by surprisal and advantage",
    unit: "advantage, from",
    note:
      "The darker, the more tokens, on a logarithmic scale. The outermost rows hold what lies " +
      "beyond them.",
    cells,
    columns: binLabels(columns, "nats"),
    rows: binLabels(rows, ""),
    xLabel: "surprisal [nats], from",
    shade: (value) => 0.12 + 0.88 * (Math.log1p(value) / Math.log1p(most)),
    reads: (row, column, value) =>
      `surprisal ${shown(columns[column])} to ${shown(columns[column + 1])}, ` +
      `advantage ${shown(rows[row])} to ${shown(rows[row + 1])}: ${counted(value, "token")}`,
  });
}

function positionFigures(step) {
  const bins = step.position_bins;
  const filled = [...bins.count.keys()].filter((at) => bins.count[at] > 0);
  const kept = filled.length ? filled[filled.length - 1] + 1 : 1;
  const labels = binLabels(bins.edges, "")
    .slice(0, kept)
    .map((label) => ({ ...label, long: `positions ${label.long}` }));
  const first = (values) => values.slice(0, kept);
  return [
    barFigure({
      title: "Entropy and surprisal along the response",
      unit: "nats, mean over tokens",
      labels,
      xLabel: "position in the response, from",
      groups: [
        { name: "entropy", values: first(bins.entropy), fill: "--ink-blue" },
        { name: "surprisal", values: first(bins.surprisal), fill: "--muted", hollow: true },
      ],
    }),
    barFigure({
      title: "Predicted change of entropy along the response",
      unit: "per unit step in the logits",
      labels,
      xLabel: "position in the response, from",
      groups: [{ name: "all tokens", values: first(bins.change), fill: "--rise" }],
    }),
  ];
}

function quadrantTable(step) {
  const rows = Object.entries(step.quadrants).map(([name, each]) => [
    QUADRANT_NAMES[name] ?? name,
    shown(each.count),
    share(each.count, step.loss_tokens),
    shown(each.change),
    shown(each.plain_change),
  ]);
  return table(
    `Quadrants of ${counted(step.loss_tokens, "token")}`,
    ["sign of A and g", "tokens", "share", "predicted change", "of the bare gradient"],
    rows,
  );
}

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)}%` : "\u2013";
}

function tokenTables(step) {
  return Object.entries(step.tokens).map(([name, rows]) => {
    const caption = TABLE_NAMES[name] ?? name;
    if (!rows.length) return note(`${caption}: none in this step.`);
    return table(
      caption,
      ["token", "id", "count", "surprisal", "predicted change"],
      rows.map((row) => [
        html("code", {}, html("bdi", {}, named(row.text))),
        String(row.id),
        shown(row.count),
        shown(Number(row.surprisal.toPrecision(3))),
        shown(Number(row.change.toPrecision(3))),
      ]),
    );
  });
}
