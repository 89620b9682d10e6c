// Rollouts to browse: conversations whose tokens are shaded by what the policy thought of them.

const EDGES = [0.1, 0.5, 1, 2, 4, 8]; // nats: where one shade ends and the next begins
const SHADINGS = {
  surprisal: "surprisal [nats]",
  entropy: "entropy [nats]",
  change: "predicted change of entropy",
};

// The filters: their names, and what of a rollout they look at; "" lets everything through.
const FILTERS = {
  step: ["Step", (rollout) => rollout.step],
  verdict: ["Verdict", (rollout) => rollout.verdict],
  finish: ["Ended", (rollout) => rollout.finish],
};
const CHOSEN = { step: "", verdict: "", finish: "", low: "", high: "", search: "" };
Object.assign(CHOSEN, { shown: null, group: false, shading: "surprisal" });
const MOST_LISTED = 200;

function rolloutsSection() {
  const runs = [...data.runs.keys()].filter((run) => data.inside[run].rollouts.length);
  if (!runs.length) {
    const none = "No rollouts were sampled; diagnostics.rollouts says how many are.";
    return note(runsInside().length ? none : NO_DIAGNOSTICS);
  }
  const chosen = view.rollouts;
  if (!runs.includes(chosen.run)) Object.assign(chosen, { ...CHOSEN, run: runs[0] });
  const filters = controls();
  const list = html("div", { class: "hits" });
  const reading = html("article", { class: "rollout", "aria-label": "Rollout" });
  // Shows what was chosen; the element of the id `focus` keeps the focus.
  const change = (changed, focus) => {
    Object.assign(chosen, changed);
    const all = data.inside[chosen.run].rollouts;
    const found = all.filter(passes);
    // the same one, also of newer data; at first the newest step's
    chosen.shown =
      found.find((each) => placeOf(each) === placeOf(chosen.shown)) ??
      found.find((each) => each.step === found.at(-1).step) ??
      null;
    if ("run" in changed) filters.replaceChildren(...rolloutFilters(runs, all, change));
    list.replaceChildren(...hits(found, all, change));
    reading.replaceChildren(...(chosen.shown ? rolloutParts(chosen.shown, all, change) : []));
    if (focus) document.getElementById(focus)?.focus();
    requestAnimationFrame(() => {
      const current = list.querySelector("[aria-current]");
      if (current) current.closest("ol").scrollTop = current.offsetTop - 60;
    });
  };
  change({ run: chosen.run });
  return [filters, list, reading];
}

function placeOf(rollout) {
  return rollout && `step ${rollout.step}, problem ${rollout.prompt_index}, sample ${rollout.sample}`;
}

function passes(rollout) {
  const { low, high, search } = view.rollouts;
  const reward = rollout.reward ?? NaN; // no reward is in no range
  return (
    Object.entries(FILTERS).every(([name, [, of]]) => ["", String(of(rollout))].includes(view.rollouts[name])) &&
    (low === "" || reward >= Number(low)) &&
    (high === "" || reward <= Number(high)) &&
    textOf(rollout).includes(search.toLowerCase())
  );
}

// All text of a rollout in small letters, once each.
const texts = new WeakMap();
function textOf(rollout) {
  if (!texts.has(rollout)) {
    const turns = rollout.turns.map(([, text]) => text);
    texts.set(rollout, [...turns, rollout.label, rollout.text.join("")].join("\n").toLowerCase());
  }
  return texts.get(rollout);
}

function rolloutFilters(runs, all, change) {
  const chosen = view.rollouts;
  const filter = ([name, [label, of]]) => {
    const values = [...new Set(all.map((each) => String(of(each))))];
    const options = [["", "all"], ...values.map((value) => [value, visible(value)])];
    return chooser(`rollout-${name}`, label, options, chosen[name], (value) => change({ [name]: value }));
  };
  const typed = (name, label, type) =>
    field(`rollout-${name}`, label, {
      type,
      value: chosen[name],
      step: type === "number" && "any",
      oninput: (event) => change({ [name]: event.target.value }),
    });
  const left = data.inside[chosen.run].sampled - all.length;
  return [
    runChooser("rollout-run", runs, chosen.run, (run) => change({ run, step: "" })),
    ...Object.entries(FILTERS).map(filter),
    typed("low", "Reward from", "number"),
    typed("high", "to", "number"),
    typed("search", "Text", "search"),
    left
      ? note(`${counted(left, "more rollout")} in diagnostics/, for which this page has no room.`)
      : "",
  ];
}

// The rollouts that pass the filters, to choose from: those around the chosen one if there are many.
function hits(found, all, change) {
  const at = found.indexOf(view.rollouts.shown);
  const start = Math.max(0, Math.min(at - MOST_LISTED / 2, found.length - MOST_LISTED));
  const listed = found.slice(start, start + MOST_LISTED).map((each, place) => {
    const id = `hit-${start + place}`;
    const parts = [
      html("span", {}, placeOf(each)),
      html("span", { class: each.verdict === "correct" ? "right" : "wrong" }, outcome(each)),
      html("bdi", { class: "start-of" }, visible(each.text.slice(0, 40).join("").slice(0, 120))),
    ];
    const current = each === view.rollouts.shown && "true";
    const open = () => change({ shown: each }, id);
    return html("li", {}, button(parts, open, { id, "aria-current": current }));
  });
  const walk = (id, text, to) =>
    button(text, () => change({ shown: found[to] }, id), { id, disabled: !found[to] });
  const cut = found.length > listed.length ? `, of which ${listed.length} are listed` : "";
  return [
    controls(
      html("p", { class: "note", role: "status" }, `${found.length} of ${counted(all.length, "rollout")}${cut}`),
      walk("rollout-before", "Previous", at - 1),
      walk("rollout-next", "Next", at + 1),
    ),
    found.length ? html("ol", { tabindex: "0", "aria-label": "Rollouts" }, listed) : "",
  ];
}

// One conversation, or all answers of its group next to each other.
function rolloutParts(rollout, all, change) {
  const { shading, group: grouped } = view.rollouts;
  const group = all.filter(
    (each) => each.step === rollout.step && each.prompt_index === rollout.prompt_index,
  );
  const several = group.length > 1;
  const press = (now) => change({ group: now }, "group");
  const choice = controls(
    several && toggle(`Group: ${group.length} answers`, grouped, press, { id: "group" }),
    chooser("shading", "Shade by", Object.entries(SHADINGS), shading, (value) =>
      change({ shading: value }, "shading"),
    ),
  );
  if (!grouped || !several) return [choice, ...conversation(rollout)];
  const card = (each) => {
    const open = () => change({ shown: each, group: false }, "group");
    return html(
      "section",
      { class: each === rollout ? "answer current" : "answer" },
      button(`sample ${each.sample}: ${outcome(each)}`, open),
      note(`${counted(each.text.length, "token")}, advantage ${shown(each.advantage)}`),
      answerTurns(each, []),
    );
  };
  return [
    choice,
    ...promptTurns(rollout),
    factsList([["Label", rollout.label]]),
    shadingKey(rollout),
    html("div", { class: "answers" }, group.map(card)),
  ];
}

function outcome(rollout) {
  const reward = rollout.reward === null ? "no reward" : `reward ${shown(rollout.reward)}`;
  return `${visible(rollout.verdict)}, ${reward}`;
}

function conversation(rollout) {
  const facts = [
    ["Verdict", outcome(rollout)],
    ["Label", rollout.label],
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
  const turns = [...promptTurns(rollout), ...answerTurns(rollout, tokens)];
  return [
    factsList(facts),
    shadingKey(rollout),
    controls(
      jump("token-before", "Previous marked token", -1),
      jump("token-next", "Next marked token", 1),
    ),
    detail,
    browsable(rollout, turns, tokens, detail),
  ];
}

function promptTurns(rollout) {
  return rollout.turns.map(([role, text]) => turn(role, [quoted(text)], "given"));
}

// The response, token by token; `tokens` takes its elements.
function answerTurns(rollout, tokens) {
  if (!rollout.stretches.length)
    return [note("The response is empty.")];
  return rollout.stretches.map(([who, first, end]) => {
    const pieces = [];
    for (let at = first; at < end; at += 1) pieces.push(tokenOf(rollout, at, tokens));
    const name = who === "policy" ? "policy" : "environment (tool output: not trained on)";
    return turn(name, pieces, who);
  });
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
  const value = rollout[view.rollouts.shading][at];
  if (value === null) return "unknown";
  if (view.rollouts.shading !== "change") return `shade-${EDGES.filter((edge) => value >= edge).length}`;
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
    view.rollouts.shading === "change"
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
    `${SHADINGS[view.rollouts.shading]}: `,
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
  const tell = ({ target }) =>
    target
      .closest(".rollout")
      .querySelector(".tokens")
      .dispatchEvent(new CustomEvent("marked", { detail: by }));
  return button(text, tell, { id });
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
