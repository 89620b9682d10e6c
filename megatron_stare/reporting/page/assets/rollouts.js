// Rollouts to browse: conversations whose tokens are shaded by what the policy thought of them.

const EDGES = [0.1, 0.5, 1, 2, 4, 8]; // nats: where one shade ends and the next begins
const SHADINGS = {
  surprisal: "surprisal [nats]",
  entropy: "entropy [nats]",
  change: "predicted change of entropy",
};

function rolloutsSection() {
  const runs = [...data.runs.keys()].filter((run) => data.inside[run].rollouts.length);
  if (!runs.length) {
    const why = runsInside().length
      ? "No rollouts were sampled; diagnostics.rollouts says how many are."
      : NO_DIAGNOSTICS;
    return [html("p", { class: "empty" }, why)];
  }
  if (!runs.includes(view.rolloutRun)) [view.rolloutRun] = runs;
  const controls = html("div", { class: "controls" });
  const reading = html("article", { class: "rollout", "aria-label": "Rollout" });
  const draw = () => {
    const all = data.inside[view.rolloutRun].rollouts;
    // at first the newest step's
    if (view.rollout === null)
      view.rollout = all.findIndex((each) => each.step === all[all.length - 1].step);
    view.rollout = Math.max(0, Math.min(all.length - 1, view.rollout));
    controls.replaceChildren(...rolloutControls(runs, all, draw));
    reading.replaceChildren(...conversation(all[view.rollout]));
  };
  draw();
  return [controls, reading];
}

function rolloutControls(runs, all, draw) {
  const go = (to, focus) => {
    view.rollout = to;
    draw();
    document.getElementById(focus)?.focus();
  };
  const options = all.map((each, at) => [
    at,
    `step ${each.step}, problem ${each.prompt_index}, sample ${each.sample}: ${outcome(each)}`,
  ]);
  const { sampled } = data.inside[view.rolloutRun];
  const parts = [
    chooser("rollout", "Rollout", options, view.rollout, (value) => go(Number(value), "rollout")),
    html(
      "button",
      {
        id: "rollout-before",
        type: "button",
        disabled: view.rollout === 0,
        onclick: () => go(view.rollout - 1, "rollout-before"),
      },
      "Previous",
    ),
    html(
      "button",
      {
        id: "rollout-next",
        type: "button",
        disabled: view.rollout === all.length - 1,
        onclick: () => go(view.rollout + 1, "rollout-next"),
      },
      "Next",
    ),
    chooser("shading", "Shade by", Object.entries(SHADINGS), view.shading, (value) => {
      view.shading = value;
      go(view.rollout, "shading");
    }),
    html(
      "p",
      { class: "note" },
      `${view.rollout + 1} of ${all.length}${all.length < sampled ? `; ${sampled - all.length} more are in diagnostics/, for which this page has no room` : ""}`,
    ),
  ];
  if (runs.length > 1) {
    parts.unshift(
      chooser(
        "rollout-run",
        "Run",
        runs.map((run) => [run, runName(run)]),
        view.rolloutRun,
        (value) => {
          view.rolloutRun = Number(value);
          go(null, "rollout-run");
        },
      ),
    );
  }
  return parts;
}

function outcome(rollout) {
  const reward = rollout.reward === null ? "no reward" : `reward ${shown(rollout.reward)}`;
  return `${visible(rollout.verdict)}, ${reward}`;
}

function conversation(rollout) {
  const facts = [
    ["Verdict", outcome(rollout)],
    ["Label", visible(rollout.label)],
    ["Advantage", shown(rollout.advantage)],
    ["Ended", rollout.finish],
    ["Tokens", shown(rollout.text.length)],
    ["Weights of version", [...new Set(rollout.versions)].join(" to ")],
  ];
  const detail = html(
    "p",
    { class: "readout token-detail", "aria-live": "polite" },
    "Choose a token: hover, tap, or the arrow keys.",
  );
  const tokens = [];
  const turns = rollout.turns.map(([role, text]) => turn(role, [quoted(text)], "given"));
  let number = 0;
  for (const [who, first, behind] of rollout.stretches) {
    const pieces = [];
    for (let at = first; at < behind; at += 1) pieces.push(tokenOf(rollout, at, tokens));
    turns.push(
      turn(who === "policy" ? "policy" : "environment (tool output: not trained on)", pieces, who),
    );
    number += 1;
  }
  if (!number) turns.push(html("p", { class: "empty" }, "The response is empty."));
  return [
    factsList(facts),
    shadingKey(rollout),
    html(
      "div",
      { class: "controls" },
      jump("token-before", "Previous marked token", -1),
      jump("token-next", "Next marked token", 1),
    ),
    detail,
    browsable(rollout, turns, tokens, detail),
  ];
}

function turn(role, body, kind) {
  return html(
    "section",
    { class: `turn ${kind}` },
    html("h3", {}, visible(role)),
    html("div", { class: "text", dir: "auto" }, body),
  );
}

// A token: shaded by its value, marked + in L+ and - in L-.
function tokenOf(rollout, at, tokens) {
  const mark = rollout.chosen[at] > 0 ? "plus" : rollout.chosen[at] < 0 ? "minus" : "";
  const node = html(
    "span",
    { class: `token ${shade(rollout, at)} ${mark}`, "data-at": at },
    visible(rollout.text[at]).replace(/\n/g, "\u21b5\n"),
  );
  tokens.push(node);
  return node;
}

function shade(rollout, at) {
  const value = rollout[view.shading][at];
  if (value === null) return "unknown";
  if (view.shading !== "change") return `shade-${EDGES.filter((edge) => value >= edge).length}`;
  const most = mostOf(rollout);
  const level = most ? Math.ceil((3 * Math.abs(value)) / most) : 0;
  return level ? `${value > 0 ? "up" : "down"}-${level}` : "shade-0";
}

// The largest change in size of a rollout, once each.
const largest = new WeakMap();
function mostOf(rollout) {
  if (!largest.has(rollout)) {
    largest.set(
      rollout,
      rollout.change.reduce((found, value) => Math.max(found, Math.abs(value ?? 0)), 0),
    );
  }
  return largest.get(rollout);
}

function shadingKey(rollout) {
  const steps =
    view.shading === "change"
      ? [
          ["down-3", "entropy down"],
          ["shade-0", "none"],
          ["up-3", `entropy up (to ${shown(Number(mostOf(rollout).toPrecision(2)))})`],
        ]
      : ["0", ...EDGES].map((edge, at) => [
          `shade-${at}`,
          at === EDGES.length ? `${edge} and more` : `from ${edge}`,
        ]);
  return html(
    "p",
    { class: "shading-key" },
    `${SHADINGS[view.shading]}: `,
    steps.map(([name, text]) => [html("span", { class: `token ${name}` }, text), " "]),
    html("span", { class: "token plus" }, "in L"),
    " ",
    html("span", { class: "token minus" }, "in L"),
    " ",
    html("span", { class: "token unknown" }, "not trained on"),
  );
}

// One stop of the Tab key for the whole text; inside it the arrow keys walk from token to token.
function browsable(rollout, turns, tokens, detail) {
  let now = -1;
  const choose = (at) => {
    tokens[now]?.classList.remove("current");
    now = Math.max(0, Math.min(tokens.length - 1, at));
    tokens[now].classList.add("current");
    detail.replaceChildren(...detailOf(rollout, now));
  };
  const box = html(
    "div",
    {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label":
        "Conversation: arrow keys walk along the tokens, Page Up and Page Down along the marked ones",
    },
    turns,
  );
  const marked = (from, by) => {
    for (let at = from + by; at >= 0 && at < tokens.length; at += by)
      if (rollout.chosen[at]) return at;
    return now < 0 ? 0 : now;
  };
  const seen = () => tokens[now].scrollIntoView({ block: "nearest" });
  box.addEventListener("keydown", (event) => {
    const to = {
      ArrowRight: now + 1,
      ArrowLeft: now - 1,
      Home: 0,
      End: tokens.length - 1,
      PageDown: marked(now, 1),
      PageUp: marked(now < 0 ? tokens.length : now, -1),
    }[event.key];
    if (to === undefined || !tokens.length) return;
    event.preventDefault();
    choose(to);
    seen();
  });
  for (const kind of ["pointerover", "click"]) {
    box.addEventListener(kind, (event) => {
      const at = event.target.closest?.(".token")?.dataset.at;
      if (at !== undefined) choose(Number(at));
    });
  }
  box.addEventListener("marked", (event) => {
    if (!tokens.length) return;
    choose(marked(event.detail < 0 && now < 0 ? tokens.length : now, event.detail));
    seen();
  });
  return box;
}

function jump(id, text, by) {
  return html(
    "button",
    {
      id,
      type: "button",
      onclick: (event) =>
        event.target
          .closest(".rollout")
          .querySelector(".tokens")
          .dispatchEvent(new CustomEvent("marked", { detail: by })),
    },
    text,
  );
}

function detailOf(rollout, at) {
  const set = { 1: "in L+", "-1": "in L\u2212" }[rollout.chosen[at]] ?? "in neither set";
  const values = [
    ["surprisal", rollout.surprisal[at]],
    ["entropy", rollout.entropy[at]],
    ["advantage", rollout.advantage],
    ["weight", rollout.weight[at]],
    ["g", rollout.sensitivity[at]],
    ["predicted change", rollout.change[at]],
  ];
  const known =
    rollout.surprisal[at] === null
      ? [html("span", { class: "reading" }, "not the policy's own: not trained on")]
      : [
          html("span", { class: "reading" }, set),
          ...values.map(([name, value]) =>
            html("span", { class: "reading" }, `${name} `, html("b", {}, shown(value))),
          ),
        ];
  return [
    html("code", {}, html("bdi", {}, named(rollout.text[at]))),
    html("span", { class: "reading" }, `token ${at + 1}`),
    ...known,
  ];
}
