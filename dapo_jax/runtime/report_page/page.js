"use strict";
// The page: everything in it comes from the payload and is written as text.
const byId = (id) => document.getElementById(id);
let payload = JSON.parse(byId("data").textContent), touched = false, begun = false;
const PAGE = 20, POLL = 3000, FEW = 3;
// Signs that cannot be seen, turn what is beside them, or are half of a pair are written out.
const CONTROLS = "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u200b-\\u200f" +
  "\\u2028-\\u202e\\u2060-\\u206f\\ufeff]", LONE = "[\\ud800-\\udbff](?![\\udc00-\\udfff])" +
  "|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]";
const HIDDEN = new RegExp(CONTROLS + "|" + LONE, "g");
const visible = (text) => text.replace(
  HIDDEN, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));

function add(parent, tag, classes, text) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  if (text !== undefined) node.textContent = visible(String(text));
  parent.append(node);
  return node;
}

function table(parent, head, rows, code, classes) {
  const node = add(add(parent, "div", "wide " + (classes || "")), "table");
  const line = add(node, "tr");
  for (const cell of head) add(line, "th", "", cell);
  for (const row of rows) {
    const tr = add(node, "tr");
    row.forEach((cell, place) => {
      const box = add(tr, place ? "td" : "th", "", place && code ? undefined : cell);
      box.dataset.head = head[place];
      if (place && code) add(box, "code", "", cell);
    });
  }
}

// Few points are not smoothed unless it was asked for.
const options = () => ({seeds: byId("seeds").value, run: +byId("run").value,
  reach: (points) => points <= 100 && !touched ? 0
    : Math.floor(points * byId("smooth").value / 100)});

// ------------------------------------------------------------------------------------ sections

function summary(parent) {
  const labels = [...new Set(payload.runs.flatMap((run) => Object.keys(run.summary)))];
  const rows = labels.map((label) => [label, ...payload.runs.map(
    (run) => run.summary[label] || "–")]);
  if (payload.runs.length > FEW) {
    const main = labels.filter((label) => !/(pass|maj)@/.test(label));  // the rest is further down
    table(parent, ["run", ...main], payload.runs.map(
      (run) => [run.name, ...main.map((label) => run.summary[label] || "–")]));
  } else if (payload.runs.length > 1) {
    table(parent, ["", ...payload.runs.map((run) => run.name)], rows);
  } else {
    const facts = add(parent, "div", "facts");
    for (const [label, value] of rows) {
      const cell = add(facts, "div");
      add(cell, "div", "faint", label);
      add(cell, "div", "", value);
    }
  }
  for (const run of payload.runs) for (const note of run.notes)
    add(parent, "p", "mark", `${run.name}: ${note}`);
}

function comparison(parent) {
  const {base, rows} = payload.comparisons;
  if (!rows.length) return;
  add(parent, "h2", "", "Is it a real difference?");
  add(parent, "p", "faint", `The last held-out figures, less those of ${base}, paired by seed. ` +
    "What is said goes by Student's t of the paired differences with Holm's correction for the " +
    "settings compared, each figure by itself; the bootstrap of few seeds is too narrow to " +
    "decide.");
  table(parent, ["figure", "setting", "in words", "difference, 95 % by t", "by bootstrap",
    "seeds"], rows, false, "stacked");
}

function legend(parent, panel, drawn) {
  const box = add(parent, "div", "legend"), keys = new Map();
  if (panel.kind === "map") {
    const entry = add(box, "span", "", "none of the prompts");
    add(entry, "span", "key");
    add(entry, "span", "", "all");
  }
  const many = payload.settings.length > 1 && panel.kind in {lines: 1, bars: 1};
  for (const one of panel.kind === "map" ? [] : drawn.found) {
    keys.set(many ? one.name : one.label, {colour: one.colour, dash: ""});
    if (many && panel.labels.length > 1)
      keys.set(one.label, {colour: "var(--faint)", dash: one.dash, last: true});
  }
  if (keys.size < 2) return;
  for (const [name, look] of [...keys].sort((a, b) => !!a[1].last - !!b[1].last)) {
    const entry = add(box, "span"), mark = svg(entry, "svg", {viewBox: "0 0 26 10", height: 10});
    svg(mark, "line", {x1: 0, x2: 26, y1: 5, y2: 5, stroke: look.colour, "stroke-width": 3,
      "stroke-dasharray": look.dash});
    add(entry, "span", "", name);
  }
}

function chart(parent, panel) {
  const figure = add(parent, "figure"), single = panel.kind in {stack: 1, map: 1};
  const of = single && payload.runs.length > 1 ? `, ${payload.runs[options().run].name}` : "";
  add(figure, "h3", "", panel.title + of);
  const line = add(figure, "div", "readout", panel.unit);
  const width = Math.max(240, figure.clientWidth);
  if (single && !panel.series.some((one) => one[0] === options().run)) {
    add(figure, "p", "faint", "this run has none of these metrics");
    return;
  }
  if (!single && panel.series.every((one) => one[3].every((value) => value === 0))) {
    add(figure, "p", "", "0 at every step");
    if (panel.note) add(figure, "figcaption", "", panel.note);
    return;
  }
  const node = svg(figure, "svg", {viewBox: `0 0 ${width} ${HEIGHT}`, role: "img",
    "aria-label": panel.title});
  const drawn = DRAW[panel.kind](panel, node, width, payload, options());
  const several = payload.settings.length > 1 && !single;
  readout(node, drawn, panel, line, (one) => !several ? one.label
    : panel.labels.length > 1 ? `${one.name}, ${one.label}` : one.name);
  legend(figure, panel, drawn);
  if (panel.note) add(figure, "figcaption", "", panel.note);
}

function phases(parent) {
  payload.runs.forEach((run, place) => {
    const found = payload.phases[place], whole = found.reduce((sum, one) => sum + one[1], 0);
    if (!whole) return;
    if (payload.runs.length > 1) add(parent, "h3", "", run.name);
    const bars = add(parent, "div", "bars"), keys = add(parent, "div", "legend");
    found.forEach(([name, seconds], number) => {
      const share = 100 * seconds / whole, colour = `var(--c${number % 8})`;
      const part = add(bars, "span");
      part.style.cssText = `width:${share}%;background:${colour}`;
      part.title = name;
      const entry = add(keys, "span"), mark = svg(entry, "svg", {viewBox: "0 0 26 10",
        height: 10});
      svg(mark, "rect", {width: 26, height: 10, fill: colour});
      add(entry, "span", "", `${name} ${seconds.toFixed(1)} s, ${share.toFixed(1)} %`);
    });
  });
}

function curvesOf(parent) {
  for (const section of payload.sections) {
    const inside = payload.panels.filter((panel) => panel.section === section);
    if (!inside.length) continue;
    add(parent, "h2", "", section);
    if (section === payload.sections.at(-1)) phases(parent);
    const box = add(parent, "div", "plots");
    for (const panel of inside) chart(box, panel);
  }
  if (payload.missing.length) add(parent, "p", "faint",
    `Left out, as no run has their metrics: ${payload.missing.join(", ")}.`);
}

function evaluations(parent) {
  for (const run of payload.runs.filter((one) => one.evaluation)) {
    add(parent, "h2", "", "Held-out evaluation" +
      (payload.runs.length > 1 ? ` of ${run.name}` : ""));
    const page = run.pages.at(-1), text = add(parent, "p", "faint",
      `After step ${run.evaluation.step}, ${run.evaluation.samples} answers a prompt; in ` +
      "brackets 95 % bootstrap intervals over prompts.");
    if (page && payload.live) {
      const link = add(text, "a", "", " every response");
      link.href = `run/${payload.runs.indexOf(run)}/${page}`;
    } else if (page) add(text, "span", "", ` Every response: ${run.name}/${page}.`);
    table(parent, run.evaluation.head, run.evaluation.rows);
  }
}

// -------------------------------------------------------------------------------- samples browser

const filters = {place: "", outcome: "", find: "", shown: PAGE};

function choose(parent, name, entries) {
  const node = add(parent, "select");
  node.setAttribute("aria-label", name);
  for (const [value, text] of entries) node.append(new Option(text, value));
  node.value = entries.some((one) => one[0] === filters[name]) ? filters[name] : "";
  node.addEventListener("change", () => {
    filters[name] = node.value;
    filters.shown = PAGE;
    listed();
  });
}

const placeOf = (row) => `${row.kind}, step ${row.step}`;

function samples(parent) {
  add(parent, "h2", "", "Samples");
  const run = payload.runs[options().run], bar = add(parent, "div", "filters");
  if (!run.samples.length) add(parent, "p", "faint", `${run.name}: no samples were written.`);
  if (payload.runs.length > 1) add(bar, "span", "faint", run.name);
  choose(bar, "place", [["", "all steps"], ...[...new Set(run.samples.map(placeOf))]
    .map((one) => [one, one])]);
  choose(bar, "outcome", [["", "right and wrong"], ["right", "right"], ["wrong", "wrong"],
    ["cut", "not stopped"]]);
  const find = add(bar, "input");
  find.type = "search";
  find.value = filters.find;
  find.placeholder = "find in prompt and completion";
  find.setAttribute("aria-label", find.placeholder);
  find.addEventListener("input", () => { filters.find = find.value; listed(); });
  if (run.samples.some((row) => row.turns))
    add(parent, "p", "faint", "What the model was told between its turns stands on a ground of its "
      + "own: it is neither scored nor learned.");
  add(parent, "p", "faint").id = "count";
  add(parent, "div").id = "list";
  const more = add(parent, "button", "", "show more");
  more.id = "more";
  more.addEventListener("click", () => { filters.shown += PAGE; listed(); });
  listed();
}

function fits(row) {
  if (filters.place && placeOf(row) !== filters.place) return false;
  if (filters.outcome === "cut" ? row.stopped !== "no"
    : filters.outcome && (filters.outcome === "right") !== row.right) return false;
  const words = filters.find.toLowerCase();
  return (row.prompt + "\n" + row.completion).toLowerCase().includes(words);
}

function listed() {
  const found = payload.runs[options().run].samples.filter(fits);
  byId("count").textContent = `${found.length} samples`;
  byId("list").replaceChildren();
  for (const row of found.slice(0, filters.shown)) {
    const card = add(byId("list"), "article"), head = add(card, "div", "head");
    add(head, "span", row.right ? "right" : "wrong", `reward ${row.reward}`);
    for (const text of [placeOf(row), `answer ${row.answer || "–"}`, `${row.length} tokens`,
      `stopped ${row.stopped}`, `kept ${row.kept}`, row.level && `level ${row.level}`,
      row.ended && `ended: ${row.ended}`])
      if (text) add(head, "span", "faint", text);
    add(card, "div", "text prompt", row.prompt).tabIndex = 0;
    for (const turn of row.turns || [{ text: row.completion }]) {
      if (turn.note) add(card, "div", turn.fault ? "wrong" : "faint", turn.note);
      add(card, "div", "text", turn.text).tabIndex = 0;
      if (turn.reply) add(card, "div", "text told", turn.reply).tabIndex = 0;
    }
    if (row.failure) add(card, "div", "wrong", `failed: ${row.failure}`);
  }
  byId("more").hidden = found.length <= filters.shown;
}

function configuration(parent) {
  const one = payload.runs.length === 1;
  add(parent, "h2", "", one ? "Configuration: what is not as by default"
    : "Configuration: what differs");
  if (payload.changes.rows.length)
    table(parent, ["field", ...payload.changes.head], payload.changes.rows, true);
  else add(parent, "p", "faint", "nothing");
  for (const run of payload.runs) {
    const box = add(parent, "details");
    add(box, "summary", "", `all fields of ${run.name}`);
    add(box, "pre", "", run.config);
  }
  if (!payload.environment.length) return;
  add(parent, "h2", "", "Environment");
  table(parent, ["", ...payload.runs.map((run) => run.name)], payload.environment);
}

// ------------------------------------------------------------------------------------- drawing

function fill() {
  const chosen = byId("run").value;
  byId("run").replaceChildren(...payload.runs.map((run, place) => new Option(run.name, place)));
  if (chosen) byId("run").value = chosen;
  byId("run-label").hidden = payload.runs.length < 2;
  byId("seeds-label").hidden = payload.settings.every((one) => one.runs.length < 2);
}

function draw() {
  const at = window.scrollY, share = byId("smooth").value, page = byId("page");
  const open = [...page.querySelectorAll("details")].map((one) => one.open);
  const typing = document.activeElement.type === "search";
  byId("width").textContent = share === "0" ? "off" : `± ${share} % of a curve`;
  byId("title").textContent = document.title = visible(payload.title);
  page.replaceChildren();
  for (const part of [summary, comparison, curvesOf, evaluations, samples, configuration])
    part(page);
  [...page.querySelectorAll("details")].forEach((one, place) => { one.open = !!open[place]; });
  if (typing) page.querySelector("input[type=search]").focus({preventScroll: true});
  if (begun) window.scrollTo(0, at);
  begun = true;
}

// While a server is behind the page, it asks for what is new.
async function poll() {
  try {
    const answer = await fetch(`data.json?known=${payload.version}`, {cache: "no-store"});
    if (answer.status === 200) {
      payload = await answer.json();
      fill();
      draw();
    }
    byId("state").textContent = "live, as of " + new Date().toLocaleTimeString();
  } catch (error) {
    byId("state").textContent = "the server has ended; this is what it showed last";
  }
  setTimeout(poll, POLL);
}

byId("smooth").addEventListener("input", () => { touched = true; draw(); });
for (const id of ["seeds", "run"]) byId(id).addEventListener("change", draw);
fill();
draw();
let wide = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === wide) return;
  wide = document.body.clientWidth;
  draw();
}).observe(document.body);
if (payload.live) poll();
else byId("state").textContent = "Reinforcement learning with verifiable rewards: dapo_jax";
