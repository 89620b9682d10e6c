// The page: its sections in order, the legend that all figures share, and news where it is live.

let text = document.getElementById("data").textContent;
let data = JSON.parse(text);

// What the reader has chosen; it outlives news.
const view = {
  hidden: new Set(),
  zoom: null, // steps, from and to
  zoomed: () => {}, // what shows them
  smoothing: 0,
  log: false,
  options: innerWidth > 900, // whether these choices are open
  stackRun: 0,
  insideRun: -1,
  insideStep: null,
  numbers: "",
  mostNumbers: 12,
  rollouts: {},
};

function section(id, title, ...content) {
  const found = content.flat().filter(Boolean);
  if (!found.length) return null;
  return html(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    html("h2", { id: `${id}-title` }, title),
    found,
  );
}

function figuresOf(name) {
  const found = data.figures.filter((each) => each.section === name).map(lineFigure);
  return found.length ? html("div", { class: "figures" }, found) : null;
}

// Shows and hides arms in every figure at once; and what else is chosen for all figures over steps.
function legend() {
  const arms = data.arms.map(({ name }, arm) =>
    toggle(
      [swatch(penOf(arm)), visible(name)],
      !view.hidden.has(name),
      (now) => {
        view.hidden[now ? "delete" : "add"](name);
        repaint();
      },
      { class: "arm" },
    ),
  );
  const made = html(
    "div",
    { class: "legend" },
    arms.length > 1 && html("div", { role: "group", "aria-label": "Arms: shown or hidden" }, arms),
    data.figures.length ? figureOptions() : null,
  );
  legendHeight.disconnect();
  legendHeight.observe(made);
  return made;
}

function figureOptions() {
  const zoomed = () => {
    const ends = inputs.map((input) => input.value);
    zoomTo(ends.every(Boolean) ? ends.map(Number) : null);
  };
  const ends = ["Steps", "to"].map((label, part) =>
    field(`zoom-${part}`, label, { type: "number", onchange: zoomed }),
  );
  const inputs = ends.map((label) => label.querySelector("input"));
  const reset = button("All steps", () => zoomTo(null));
  view.zoomed = () => {
    inputs.forEach((input, part) => (input.value = view.zoom?.[part] ?? ""));
    reset.disabled = !view.zoom;
  };
  view.zoomed();
  const smooth = (event) => {
    view.smoothing = Number(event.target.value);
    repaint();
  };
  const range = { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing };
  const log = toggle("Log axis", view.log, (now) => {
    view.log = now;
    repaint();
  });
  return html(
    "details",
    { class: "options", open: view.options, ontoggle: ({ target }) => (view.options = target.open) },
    html("summary", {}, "Figures"),
    controls(field("smoothing", "Smoothing", { ...range, oninput: smooth }), ends, reset, log),
    note(
      "Drag across a figure to zoom; a double click shows all steps. The axis is logarithmic ",
      "where all values are above 0.",
    ),
  );
}

// What is jumped to stands below the legend, which stays in sight and is as high as its rows.
const legendHeight = new ResizeObserver(([{ target }]) => {
  document.documentElement.style.scrollPaddingTop = `${target.offsetHeight + 12}px`;
});

function resultsTable() {
  const { arms, rows, seeds } = data.table;
  if (!rows.length) return null;
  const cell = (found) => {
    if (!found?.half_width) return found?.mean ?? "\u2013";
    const each = html("small", {}, found.each.join(" / "));
    return html("span", {}, `${found.mean} \u00b1 ${found.half_width}`, each);
  };
  const head = arms.map((name) => {
    const pen = penOf(data.arms.findIndex((arm) => arm.name === name));
    return html("span", { class: "name" }, swatch(pen), ` ${visible(name)}`);
  });
  const lines = rows.map((row) => [row.label, ...row.cells.map(cell)]);
  const means = `Mean over seeds ${seeds.join(", ")} with its 95% interval (Student's t); small: each seed.`;
  return html("div", {}, table("The runs in numbers", ["", ...head], lines), seeds.length > 1 && note(means));
}

function findings() {
  const list = (title, kind, texts) =>
    texts.length &&
    html(
      "section",
      { class: `finding ${kind}` },
      html("h3", {}, title),
      html("ul", {}, texts.map((text) => html("li", {}, visible(text)))),
    );
  const [held, failed] = [true, false].map((which) =>
    data.findings.filter((each) => each.held === which).map(({ text }) => text),
  );
  const against = [...failed.map((text) => `Did not hold. ${text}`), ...data.caveats];
  if (!held.length && !against.length) return null;
  return html(
    "div",
    {},
    list("What held", "held", held),
    list("What did not hold, and what to keep in mind", "failed", against),
  );
}

const STACKS = {
  quadrants: {
    title: "Quadrants: shares of the tokens",
    unit: "share of loss tokens",
    limits: [0, 1],
    note: "By the signs of the advantage A and of the sensitivity g. What is left over has advantage 0.",
    fills: ["--up-strong", "--down-soft", "--down-strong", "--up-soft"],
  },
  seconds: {
    title: "Time per phase",
    unit: "seconds per step",
    note: "A phase that did not run in a step counts as zero in it. other: what no phase accounts for.",
  },
};

// One run's areas, with a choice of the run where there are several.
function stackPart(kind) {
  const stacks = data.stacks.filter((stack) => stack.kind === kind);
  if (!stacks.length) return null;
  const holder = html("div");
  const draw = () => {
    const stack = stacks.find(({ run }) => run === view.stackRun) ?? stacks[0];
    const choose = (run) => {
      view.stackRun = run;
      draw();
    };
    forget(holder);
    holder.replaceChildren(
      controls(runChooser(`${kind}-run`, stacks.map(({ run }) => run), stack.run, choose)),
      html("div", { class: "figures" }, stackFigure({ ...STACKS[kind], stack })),
    );
  };
  draw();
  return holder;
}

function predictions() {
  const found = data.predictions.map((each, run) => each && scatterFigure(run, each));
  return found.some(Boolean) ? html("div", { class: "figures" }, found) : null;
}

function faults() {
  const counts = data.faults.flatMap(({ counts: found }, run) =>
    found.map(({ text, count, first, last }) => [text, runName(run), ...[count, first, last].map(shown)]),
  );
  const alarms = data.faults.flatMap(({ alarms: found }, run) =>
    found.map((each) => alarmCard(each, run)),
  );
  const head = ["what", "run", "times", "first step", "last step"];
  return [
    counts.length
      ? table("Faults survived", head, counts, "cards")
      : note("Faults survived: none. No engine fault, no step left out."),
    alarms.length
      ? html("section", {}, html("h3", {}, "Alarms"), html("ul", { class: "alarms" }, alarms))
      : note("Alarms: none was raised."),
  ];
}

// One cause: its alarms are one card, however often it was raised.
function alarmCard({ alarm, steps, first_step: since, message, remedy, rollouts }, run) {
  const times = steps.length > 1 ? `${steps.length} times, at steps ${steps[0]} to ` : "once, at step ";
  const named = rollouts.slice(0, 8).map((pair) => pair.join("/")).join(", ");
  const more = rollouts.length > 8 ? `, and ${rollouts.length - 8} more` : "";
  return html(
    "li",
    {},
    html("b", {}, visible(alarm)),
    ` \u00b7 ${runName(run)} \u00b7 raised ${times}${steps.at(-1)}`,
    since < steps[0] ? `; the cause is there since step ${since}` : "",
    html("p", {}, visible(message)),
    html("p", {}, html("b", {}, "Remedy: "), visible(remedy), "."),
    named && note(`Rollouts (problem/sample): ${named}${more}`),
  );
}

// What ran: settings of the arms, versions, commit, machine, command.
function about() {
  const { starts, differing, common, commands } = data.about;
  const names = data.arms.map(({ name }) => visible(name));
  const all = names.length > 1 ? "all arms have" : "the run has";
  const start = ({ runs, facts }) =>
    html(
      "section",
      { class: "start" },
      html("h3", {}, runs.length === data.runs.length ? "All runs" : runs.map(runName).join("; ")),
      facts.length ? factsList(facts) : note("Versions and machine were not recorded."),
    );
  const settings = (caption, head, rows) => {
    const cells = ([key, ...values]) => [html("code", {}, visible(key)), ...values.map(visible)];
    return rows.length && table(caption, ["setting", "default", ...head], rows.map(cells), "cards");
  };
  const folded = (title, content) => html("details", {}, html("summary", {}, title), content);
  return [
    starts.map(start),
    settings("Settings on which the arms differ", names, differing),
    common.length &&
      folded(
        `${counted(common.length, "setting")} that ${all} changed`,
        settings("Changed settings", ["value"], common),
      ),
    folded("Commands", commands.map((text) => html("pre", { tabindex: "0" }, visible(text)))),
  ];
}

// A grid of the metrics whose names hold all words of what is searched for.
function everyNumber() {
  if (!data.numbers.length) return null;
  const holder = html("div", { class: "figures grid" });
  const more = controls();
  const fill = () => {
    const words = view.numbers.toLowerCase().split(/\s+/);
    const found = data.numbers.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    const drawn = found.slice(0, view.mostNumbers);
    const rest = found.length - drawn.length;
    forget(holder);
    holder.replaceChildren(...drawn.map(numberFigure));
    more.replaceChildren(
      note(`${drawn.length} of ${counted(data.numbers.length, "metric")}`),
      rest ? button(`Show ${rest} more`, () => change({ mostNumbers: Infinity })) : "",
    );
  };
  const change = (changed) => {
    Object.assign(view, changed);
    fill();
  };
  fill();
  const oninput = (event) => change({ numbers: event.target.value });
  const search = { type: "search", value: view.numbers, placeholder: "seconds_, eval ...", oninput };
  return [controls(field("numbers-search", "Metrics with", search)), holder, more];
}

function numberFigure(name) {
  const spec = { name: "", title: name, unit: "", note: "", keys: { [name]: "" } };
  return lineFigure({ ...spec, zero: false, limits: null, rule: null });
}

// How the figures are to be read: what a band is, and what was left out.
function reading() {
  const thinned =
    `Long runs are drawn in up to ${data.most_points} buckets of steps ` +
    `(${data.most_other_points} under "Every number"): the line is the mean of a bucket, the band ` +
    "around it reaches from its lowest to its highest value. ";
  const seeds =
    "Where an arm has several seeds, thin lines are seeds, the thick one is their mean and the band " +
    "its 95% interval (Student's t).";
  const several = Object.values(data.lines).some((line) => Object.keys(line.means).length);
  const long = data.runs.some((run) => run.rows > data.most_other_points);
  return long || several ? note(long ? thinned : "", several ? seeds : "") : null;
}

function sections() {
  const results = [resultsTable(), findings()].filter(Boolean);
  return [
    section("entropy", "Entropy", figuresOf("entropy"), reading()),
    section("results", "Results", results.length && html("div", { class: "results" }, results)),
    section("learning", "Learning", figuresOf("learning"), figuresOf("evaluation")),
    section("control", "Gate, weights and quadrants", figuresOf("control"), stackPart("quadrants")),
    section(
      "prediction",
      "Predicted and realised change of entropy",
      predictions(),
      figuresOf("prediction"),
    ),
    section("inside", "Inside a step", insideSection()),
    section("rollouts", "Rollouts", rolloutsSection()),
    section(
      "machine",
      "Time, staleness and faults",
      stackPart("seconds"),
      figuresOf("machine"),
      faults(),
    ),
    section("numbers", "Every number", everyNumber()),
    section("about", "Configuration, versions and machine", about()),
  ].filter(Boolean);
}

function draw() {
  const focused = document.activeElement?.id;
  const content = document.getElementById("content");
  forget(content);
  const parts = sections();
  const link = (part) => html("a", { href: `#${part.id}` }, part.querySelector("h2").textContent);
  content.replaceChildren(
    html("h1", {}, visible(data.title)),
    html("p", { class: "lead" }, visible(data.lead)),
    html("nav", { "aria-label": "Sections" }, parts.map(link)),
    legend(),
    data.live ? html("p", { class: "note", role: "status", id: "live" }, FOLLOWS) : "",
    ...parts,
  );
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

// Asks the page's own server for a newer page, and takes its data over.
const FOLLOWS = "Live: follows the run.";
let tag = null;
async function news() {
  const status = document.getElementById("live");
  try {
    const answer = await fetch("/", { headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      const found = new DOMParser()
        .parseFromString(await answer.text(), "text/html")
        .getElementById("data").textContent;
      if (found !== text) {
        text = found;
        data = JSON.parse(text);
        draw();
      }
    }
    const writing = "Live: the run is writing; the next look is in a moment.";
    if (status) status.textContent = answer.status === 503 ? writing : FOLLOWS;
  } catch {
    if (status) status.textContent = "No longer live: the server has ended.";
  }
  setTimeout(news, 3000);
}

draw();
if (data.live) news();
