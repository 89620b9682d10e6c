// Elements, numbers and texts. Nothing here ever parses a string as HTML.

const SVG = "http://www.w3.org/2000/svg";

function built(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  // what a condition left out: null, undefined, false, 0 of a length
  node.append(...children.flat(4).filter((child) => child || child === ""));
  return node;
}

function html(tag, attributes = {}, ...children) {
  return built(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return built(document.createElementNS(SVG, tag), attributes, children);
}

// A number as a reader wants it: four significant digits, a true minus, no exponent where short.
function shown(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (size >= 1e7 || size < 1e-4) text = value.toExponential(2);
  else if (Number.isInteger(value)) text = String(value);
  else text = String(Number(value.toPrecision(4)));
  return text.replaceAll("-", "\u2212");
}

function counted(count, one, many = `${one}s`) {
  return `${shown(count)} ${count === 1 ? one : many}`;
}

// What cannot be seen, or would reorder what is around it, is written out: [U+202E].
function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}]/gu, (letter) => {
    if (letter === "\n" || letter === "\t") return letter;
    const code = letter.codePointAt(0);
    if (code >= 0xd800 && code <= 0xdfff) return "\ufffd";
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

// A token alone, for labels: its blanks are marked too.
function named(text) {
  if (text === "") return "(part of the next character)";
  return visible(text).replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/ /g, "\u00b7");
}

// A text that keeps its own direction and line breaks.
function quoted(text) {
  return html("bdi", { class: "quoted" }, visible(text));
}

const DASHES = [[], [7, 3], [2, 2.5], [9, 3, 2, 3], [5, 2], [12, 4], [1.5, 3], [6, 2, 2, 2], [3, 3], [14, 3]];

// How an arm is drawn everywhere: a colour of the style sheet, and a dash that says the same
// without colour.
function penOf(arm) {
  const place = data.arms[arm].colour;
  return { colour: `--arm-${place}`, dash: DASHES[place] };
}

function swatch({ colour, dash }) {
  return svg(
    "svg",
    { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" },
    svg("line", {
      x1: 1,
      x2: 25,
      y1: 5,
      y2: 5,
      stroke: `var(${colour})`,
      "stroke-width": 2.5,
      "stroke-dasharray": dash.join(" "),
    }),
  );
}

function runName(number) {
  const run = data.runs[number];
  const arm = data.arms[run.arm].name;
  const several = data.runs.filter((other) => other.arm === run.arm).length > 1;
  return several ? `${arm}, seed ${run.seed}` : arm;
}

function note(...content) {
  return html("p", { class: "note" }, content);
}

function controls(...content) {
  return html("div", { class: "controls" }, content);
}

function button(text, onclick, attributes = {}) {
  return html("button", { type: "button", onclick, ...attributes }, text);
}

// A choice with its label; `options` are [value, text].
function chooser(id, label, options, value, changed) {
  const select = html("select", { id, onchange: (event) => changed(event.target.value) });
  for (const [key, text] of options)
    select.append(html("option", { value: key, selected: String(key) === String(value) }, text));
  return html("label", { class: "choice", for: id }, `${label} `, select);
}

// A choice of one of the runs, if there are several.
function runChooser(id, runs, value, changed) {
  if (runs.length < 2) return "";
  const options = runs.map((run) => [run, runName(run)]);
  return chooser(id, "Run", options, value, (run) => {
    changed(Number(run));
    document.getElementById(id).focus();
  });
}

// An input with its label.
function field(id, label, attributes) {
  return html("label", { class: "choice", for: id }, `${label} `, html("input", { id, ...attributes }));
}

// A button that stays pressed.
function toggle(text, pressed, changed, attributes = {}) {
  const press = ({ currentTarget }) => {
    const now = currentTarget.getAttribute("aria-pressed") !== "true";
    currentTarget.setAttribute("aria-pressed", String(now));
    changed(now);
  };
  return button(text, press, { "aria-pressed": String(pressed), ...attributes });
}

function factsList(facts) {
  const pair = ([name, text]) =>
    html("div", {}, html("dt", {}, name), html("dd", {}, html("bdi", {}, visible(text))));
  return html("dl", { class: "facts" }, facts.map(pair));
}

// On a phone the cells of a `kind` "cards" are lines of a card, with the head's text before each.
function table(caption, head, rows, kind = "") {
  const cellOf = (cell, at) =>
    at
      ? html("td", { "data-label": head[at].textContent ?? head[at] }, cell)
      : html("th", { scope: "row" }, cell);
  const named = (text) => html("th", { scope: "col" }, text);
  return html(
    "div",
    { class: `wide ${kind}`, tabindex: "0", role: "region", "aria-label": caption },
    html(
      "table",
      {},
      html("caption", {}, caption),
      html("thead", {}, html("tr", {}, head.map(named))),
      html("tbody", {}, rows.map((cells) => html("tr", {}, cells.map(cellOf)))),
    ),
  );
}
