// The page: its sections in order, the legend that all figures share, and news where it is live.

let text = document.getElementById("data").textContent;
let data = JSON.parse(text);

// What the reader has chosen; it outlives news.
const view = {
  hidden: new Set(),
  stackRun: 0,
  insideRun: -1,
  insideStep: null,
  rolloutRun: -1,
  rollout: null,
  shading: "surprisal",
  other: "",
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

// Shows and hides arms in every figure at once.
function legend() {
  if (data.arms.length < 2) return null;
  const buttons = data.arms.map(({ name }, arm) =>
    html(
      "button",
      {
        type: "button",
        class: "arm",
        "aria-pressed": String(!view.hidden.has(name)),
        onclick: (event) => {
          if (!view.hidden.delete(name)) view.hidden.add(name);
          event.currentTarget.setAttribute("aria-pressed", String(!view.hidden.has(name)));
          for (const draw of drawings) draw();
        },
      },
      swatch(penOf(arm)),
      name,
    ),
  );
  const made = html(
    "div",
    { class: "legend", role: "group", "aria-label": "Arms: shown or hidden" },
    buttons,
  );
  legendHeight.disconnect();
  legendHeight.observe(made);
  return made;
}

// What is jumped to stands below the legend, which stays in sight and is as high as its rows.
const legendHeight = new ResizeObserver(([{ target }]) => {
  document.documentElement.style.scrollPaddingTop = `${target.offsetHeight + 12}px`;
});

function resultsTable() {
  const { arms, rows, seeds } = data.table;
  if (!rows.length) return null;
  const cell = (found) => {
    if (!found) return "\u2013";
    if (!found.half_width) return found.mean;
    return html(
      "span",
      {},
      `${found.mean} \u00b1 ${found.half_width}`,
      html("small", {}, found.each.join(" / ")),
    );
  };
  const head = arms.map((name) => {
    const arm = data.arms.findIndex((each) => each.name === name);
    return html("span", {}, swatch(penOf(arm)), ` ${name}`);
  });
  const note =
    seeds.length > 1
      ? html(
          "p",
          { class: "note" },
          `Mean over seeds ${seeds.join(", ")} with its 95% interval (Student's t); small: each seed.`,
        )
      : null;
  return [
    table(
      "The runs in numbers",
      ["", ...head],
      rows.map((row) => [row.label, ...row.cells.map(cell)]),
    ),
    note,
  ];
}

function findings() {
  const list = (title, kind, texts) =>
    texts.length
      ? html(
          "section",
          { class: `finding ${kind}` },
          html("h3", {}, title),
          html(
            "ul",
            {},
            texts.map((text) => html("li", {}, visible(text))),
          ),
        )
      : null;
  const failed = data.findings
    .filter((each) => !each.held)
    .map((each) => `Did not hold. ${each.text}`);
  return [
    list(
      "What held",
      "held",
      data.findings.filter((each) => each.held).map((each) => each.text),
    ),
    list("What did not hold, and what to keep in mind", "failed", [...failed, ...data.caveats]),
  ];
}

const STACKS = {
  quadrants: {
    title: "Quadrants: shares of the tokens",
    unit: "share of loss tokens",
    limits: [0, 1],
    note: "By the signs of the advantage A and of the sensitivity g. What is left over has advantage 0.",
    fills: ["var(--up-strong)", "var(--down-soft)", "var(--down-strong)", "var(--up-soft)"],
  },
  seconds: {
    title: "Time per phase",
    unit: "seconds per step",
    note: "A phase that did not run in a step counts as zero in it. other: what no phase accounts for.",
  },
};

// One run's areas, with a choice of the run where there are several.
function stackPart(kind, id) {
  const stacks = data.stacks.filter((stack) => stack.kind === kind);
  if (!stacks.length) return null;
  const holder = html("div", { class: "figures" });
  const controls = html("div", { class: "controls" });
  const draw = () => {
    const chosen = stacks.find((stack) => stack.run === view.stackRun) ?? stacks[0];
    holder.replaceChildren(stackFigure({ ...STACKS[kind], stack: chosen }));
    if (stacks.length > 1) {
      controls.replaceChildren(
        chooser(
          id,
          "Run",
          stacks.map((stack) => [stack.run, runName(stack.run)]),
          chosen.run,
          (value) => {
            view.stackRun = Number(value);
            draw();
            document.getElementById(id).focus();
          },
        ),
      );
    }
  };
  draw();
  return html("div", {}, controls, holder);
}

function predictions() {
  const found = data.predictions
    .map((each, run) => (each ? scatterFigure(run, each) : null))
    .filter(Boolean);
  return found.length ? html("div", { class: "figures" }, found) : null;
}

function faults() {
  const counts = data.faults.flatMap(({ counts: found }, run) =>
    found.map((each) => [
      each.text,
      runName(run),
      shown(each.count),
      shown(each.first),
      shown(each.last),
    ]),
  );
  const alarms = data.faults.flatMap(({ alarms: found }, run) =>
    found.map((each) => alarmCard(each, run)),
  );
  return [
    counts.length
      ? table("Faults survived", ["what", "run", "times", "first step", "last step"], counts)
      : html("p", { class: "empty" }, "Faults survived: none. No engine fault, no step left out."),
    alarms.length
      ? html("section", {}, html("h3", {}, "Alarms"), html("ul", { class: "alarms" }, alarms))
      : html("p", { class: "empty" }, "Alarms: none was raised."),
  ];
}

// One cause: its alarms are one card, however often it was raised.
function alarmCard(alarm, run) {
  const { steps, rollouts } = alarm;
  const times =
    steps.length > 1
      ? `raised ${steps.length} times, at steps ${steps[0]} to ${steps[steps.length - 1]}`
      : `raised at step ${steps[0]}`;
  const since = alarm.first_step < steps[0] ? `, for the first time since step ${alarm.first_step}` : "";
  const named = rollouts.slice(0, 8).map(([prompt, sample]) => `${prompt}/${sample}`);
  const more = rollouts.length > 8 ? `, and ${rollouts.length - 8} more` : "";
  return html(
    "li",
    {},
    html("b", {}, visible(alarm.alarm)),
    ` \u00b7 ${runName(run)} \u00b7 ${times}${since}`,
    html("p", {}, visible(alarm.message)),
    html("p", {}, html("b", {}, "Remedy: "), visible(alarm.remedy), "."),
    rollouts.length
      ? html("p", { class: "note" }, `Rollouts (problem/sample): ${named.join(", ")}${more}`)
      : null,
  );
}

// What ran: settings of the arms, versions, commit, machine, command.
function about() {
  const { starts, differing, common, commands } = data.about;
  const names = data.arms.map(({ name }) => name);
  const cards = starts.map(({ runs, facts }) => {
    const title = runs.length === data.runs.length ? "All runs" : runs.map(runName).join("; ");
    return html(
      "section",
      { class: "start" },
      html("h3", {}, title),
      facts.length
        ? factsList(facts)
        : html("p", { class: "empty" }, "Versions and machine were not recorded."),
    );
  });
  const folded = (title, ...content) => html("details", {}, html("summary", {}, title), content);
  return [
    cards,
    differing.length
      ? settingsTable("Settings on which the arms differ", ["setting", "default", ...names], differing)
      : null,
    common.length
      ? folded(
          `${counted(common.length, "more setting")} that ${names.length > 1 ? "all arms have" : "the run has"} changed`,
          settingsTable("Changed settings", ["setting", "default", "value"], common),
        )
      : null,
    folded("Commands", commands.map((text) => html("pre", { tabindex: "0" }, visible(text)))),
  ];
}

function factsList(facts) {
  return html(
    "dl",
    { class: "facts" },
    facts.map(([name, text]) =>
      html("div", {}, html("dt", {}, name), html("dd", {}, html("bdi", {}, visible(text)))),
    ),
  );
}

function settingsTable(caption, head, rows) {
  return table(
    caption,
    head,
    rows.map(([key, ...values]) => [html("code", {}, visible(key)), ...values.map(visible)]),
    "settings",
  );
}

function everyNumber() {
  if (!data.others.length) return null;
  if (!data.others.includes(view.other)) [view.other] = data.others;
  const holder = html("div", { class: "figures" });
  const draw = () =>
    holder.replaceChildren(
      lineFigure({
        name: "other",
        title: view.other,
        unit: "as in metrics.jsonl",
        note: "",
        keys: { [view.other]: "" },
        zero: false,
        limits: null,
        rule: null,
      }),
    );
  draw();
  const choose = chooser(
    "other",
    "Metric",
    data.others.map((key) => [key, key]),
    view.other,
    (value) => {
      view.other = value;
      draw();
    },
  );
  return [html("div", { class: "controls" }, choose), holder];
}

// How the figures are to be read: what a band is, and what was left out.
function reading() {
  const thinned = data.runs.some((run) => run.rows > data.most_other_points);
  const several = Object.values(data.lines).some((line) => Object.keys(line.means).length);
  const parts = [];
  if (thinned) {
    parts.push(
      `Long runs are drawn in up to ${data.most_points} buckets of steps (${data.most_other_points} under "Every number"): ` +
        "the line is the mean of a bucket, the band around it reaches from its lowest to its highest value.",
    );
  }
  if (several)
    parts.push(
      "Where an arm has several seeds, thin lines are seeds, the thick one is their mean and the band its 95% interval (Student's t).",
    );
  return parts.length ? html("p", { class: "note" }, parts.join(" ")) : null;
}

function sections() {
  return [
    section("entropy", "Entropy", figuresOf("entropy"), reading()),
    section("results", "Results", resultsTable(), findings()),
    section("learning", "Learning", figuresOf("learning"), figuresOf("evaluation")),
    section(
      "control",
      "Gate, weights and quadrants",
      figuresOf("control"),
      stackPart("quadrants", "quadrants-run"),
    ),
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
      stackPart("seconds", "seconds-run"),
      figuresOf("machine"),
      faults(),
    ),
    section("numbers", "Every number", everyNumber()),
    section("about", "Configuration, versions and machine", about()),
  ].filter(Boolean);
}

function draw() {
  const focused = document.activeElement?.id;
  drawings.clear();
  const parts = sections();
  const links = parts.map((part) =>
    html("a", { href: `#${part.id}` }, part.querySelector("h2").textContent),
  );
  document
    .getElementById("content")
    .replaceChildren(
      html("h1", {}, visible(data.title)),
      html("p", { class: "lead" }, visible(data.lead)),
      html("nav", { "aria-label": "Sections" }, links),
      ...[
        legend(),
        data.live
          ? html("p", { class: "note live", role: "status", id: "live" }, "Live: follows the run.")
          : null,
        ...parts,
      ].filter(Boolean),
    );
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

// Asks the page's own server for a newer page, and takes its data over.
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
    if (status)
      status.textContent =
        answer.status === 503
          ? "Live: the run is writing; the next look is in a moment."
          : "Live: follows the run.";
  } catch {
    if (status) status.textContent = "No longer live: the server has ended.";
  }
  setTimeout(news, 3000);
}

draw();
if (data.live) news();
