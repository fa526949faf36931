"""The page of an evaluation: every response with what was found in it and why it counts.

One self-contained HTML file that works from disk. The responses are JSON inside it; its script
writes them as text only, so nothing in them can become markup.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from dapo_jax.runtime import eval_figures, page

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #1c2128; --faint: #5d6673; --paper: #fff; --line: #d9dde3;
  --card: #f6f7f9; --right: #1f7a3f; --wrong: #b0372f; --other: #8a5200; --chosen: #e3ebf7;
  --told: #ece4f6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e6ea; --faint: #9aa3af; --paper: #16191d; --line: #343a42; --card: #1f2329;
    --right: #62c587; --wrong: #f0857c; --other: #e0a458; --chosen: #2b3a52; --told: #35293f; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 64rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; }
p, .faint { color: var(--faint); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left;
  vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
#bar { position: sticky; top: 0; background: var(--paper); border-bottom: 1px solid var(--line);
  padding: .6rem 0; display: flex; flex-wrap: wrap; gap: .4rem; align-items: center; z-index: 1; }
button, select, input { font: inherit; font-size: .85rem; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; padding: .25rem .6rem; }
button[aria-pressed=true] { background: var(--chosen); border-color: var(--faint); }
input { flex: 1 1 9rem; min-width: 6rem; }
#count { font-size: .8rem; flex-basis: 100%; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  margin: .9rem 0; padding: .7rem .9rem; }
.text { font: .82rem/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: .3rem 0; max-height: 22rem; overflow-y: auto; unicode-bidi: isolate; }
.head { font-size: .85rem; }
.told { background: var(--told); border-radius: 4px; padding: .1rem .4rem; }
.response { border-top: 1px solid var(--line); padding-top: .5rem; margin-top: .5rem; }
.response .head { display: flex; flex-wrap: wrap; gap: .2rem .9rem; }
.verdict { font-weight: 600; }
.right { color: var(--right); } .wrong { color: var(--wrong); }
.invalid, .mark { color: var(--other); }
@media (max-width: 40rem) { #bar { position: static; } }
code { font: .85em ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap;
  unicode-bidi: isolate; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ report.samples }} answers to each of {{ report.prompts }} prompts{{ sampling }}. In brackets:
95% bootstrap intervals over prompts. {{ shown }}{% if episodes %} What the model was told between
its turns stands on <span class="told">this ground</span>: it is neither scored nor learned.{% endif
%}</p>
<div class="wide"><table><tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<div id="bar">
{% for kind in kinds %}<button data-kind="{{ kind }}"
 aria-pressed="{{ 'true' if kind == 'all' else 'false' }}">{{ kind }}</button>
{% endfor %}
<select id="mode" aria-label="mode"></select><select id="dataset" aria-label="data set"></select>
<select id="level" aria-label="level"></select>
<input id="find" type="search" placeholder="find in text" aria-label="find in text">
<div id="count" class="faint" aria-live="polite"></div>
</div>
<noscript><p>This page needs its script to list the responses; they are in samples/eval_*.jsonl
too.</p></noscript>
<main id="list"></main>
<button id="more" hidden>show more</button>
<script type="application/json" id="data">{{ data }}</script>
<script>
"use strict";
const PROMPTS = JSON.parse(document.getElementById("data").textContent);
const PAGE = 20, byId = (id) => document.getElementById(id);
let kind = "all", found = [], shown = 0;

// Signs that cannot be seen, turn what is beside them, or are half of a pair are written out.
const CONTROLS = "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u200b-\\u200f\\u2028-\\u202e" +
  "\\u2060-\\u206f\\ufeff]", LONE = "[\\ud800-\\udbff](?![\\udc00-\\udfff])" +
  "|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]";
const HIDDEN = new RegExp(CONTROLS + "|" + LONE, "g");
const visible = (text) => text.replace(
  HIDDEN, (sign) => "\\\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));

function add(parent, tag, classes, text) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function pair(parent, label, value) {
  const span = add(parent, "span", "", label + " ");
  if (value === null) add(span, "span", "mark", "none");
  else add(span, "code", "", visible(value));
}

function fits(response) {
  if (byId("mode").value && response.mode !== byId("mode").value) return false;
  if (kind === "truncated") return response.truncated;
  if (kind === "no answer") return response.extracted === null;
  return kind === "all" || response.verdict === kind;
}

function select() {
  const words = byId("find").value.toLowerCase();
  found = [];
  let responses = 0;
  for (const prompt of PROMPTS) {
    if (byId("dataset").value && prompt.dataset !== byId("dataset").value) continue;
    if (byId("level").value && prompt.level !== byId("level").value) continue;
    const inPrompt = prompt.prompt.toLowerCase().includes(words);
    const kept = prompt.responses.filter(
      (one) => fits(one) && (inPrompt || one.text.toLowerCase().includes(words)));
    if (kept.length) { found.push([prompt, kept]); responses += kept.length; }
  }
  byId("count").textContent = responses + " responses to " + found.length + " prompts";
  byId("list").replaceChildren();
  shown = 0;
  more();
}

function episode(box, one) {
  one.turns.forEach((turn, at) => {
    const line = add(box, "div", "head faint", "turn " + (at + 1) + " · reward " + turn.reward +
      " · " + turn.seconds.toFixed(3) + " s");
    for (const [name, value] of Object.entries(turn.parts))
      add(line, "span", value && name.includes("error") ? "mark" : "",
        " · " + name.replaceAll("_", " ") + " " + value);
    add(box, "div", "text", visible(turn.text)).tabIndex = 0;
    if (turn.reply && !turn.done)
      add(box, "div", "text told", visible(turn.reply)).tabIndex = 0;
  });
  if (one.last) add(box, "div", "text", visible(one.last)).tabIndex = 0;
  const why = one.failure ? "failed (" + one.failure + "): " + one.message : "over: " + one.ended;
  add(box, "div", "head " + (one.failure ? "mark" : "faint"), visible(why));
}

function card(prompt, responses) {
  const article = add(byId("list"), "article");
  const right = prompt.responses.filter((one) => one.mode === "sampled");
  add(article, "div", "head faint", ["prompt " + prompt.id, prompt.dataset,
    prompt.level && "level " + prompt.level,
    right.filter((one) => one.verdict === "right").length + " of " + right.length + " right"
  ].filter((part) => part).join(" · "));
  add(article, "div", "text", visible(prompt.prompt)).tabIndex = 0;
  for (const one of responses) {
    const box = add(article, "div", "response"), line = add(box, "div", "head");
    add(line, "span", "verdict " + one.verdict, one.verdict);
    if (one.truncated) add(line, "span", "mark", "truncated");
    pair(line, "extracted", one.extracted);
    pair(line, "right answer", prompt.answer);
    add(line, "span", "faint", one.mode + " · " + one.length + " tokens · reward " + one.reward);
    if (one.episode) episode(box, one.episode);
    else add(box, "div", "text", visible(one.text)).tabIndex = 0;
  }
}

function more() {
  for (const [prompt, responses] of found.slice(shown, shown + PAGE)) card(prompt, responses);
  shown += PAGE;
  byId("more").hidden = shown >= found.length;
}

function fill(id, label, values) {
  const names = [...new Set(values)].filter((name) => name).sort();
  byId(id).hidden = names.length < 2;
  byId(id).append(new Option(label, ""), ...names.map((name) => new Option(name, name)));
  byId(id).addEventListener("change", select);
}

fill("mode", "sampled and greedy", PROMPTS.flatMap((one) => one.responses.map((r) => r.mode)));
fill("dataset", "all data sets", PROMPTS.map((one) => one.dataset));
fill("level", "all levels", PROMPTS.map((one) => one.level));
for (const button of document.querySelectorAll("button[data-kind]"))
  button.addEventListener("click", () => {
    kind = button.dataset.kind;
    for (const other of document.querySelectorAll("button[data-kind]"))
      other.setAttribute("aria-pressed", String(other === button));
    select();
  });
byId("find").addEventListener("input", select);
byId("more").addEventListener("click", more);
select();
</script>
</body>
</html>
"""
KINDS = ("all", "wrong", "right", "truncated", "invalid", "no answer")


def render(title: str, report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *,
           limit: int) -> str:
    """The page as text: the report's table, and the responses of the first prompts, at most
    `limit` of them (0: all).

    A row has prompt_id, prompt, answer, dataset, level, mode (sampled or greedy), completion,
    extracted, verdict (right, wrong or invalid), stopped, length and reward, and episode (as
    rollout/episodes_log.row makes it) if it is of several turns.
    """
    prompts, count = _by_prompt(rows, limit)
    shown = "" if count == len(rows) else (f"Here are {count} of {len(rows)} responses, those to "
                                           "the first prompts; samples/eval_*.jsonl holds all.")
    head, cells = eval_figures.table(report)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(TEMPLATE).render(
        title=title, report=report, sampling=f", {report.get('sampling', 'sampled')}",
        shown=shown, head=head, rows=cells, kinds=KINDS, data=page.embedded(prompts),
        episodes=any("episode" in row for row in rows))
    return text.encode("utf-8", "backslashreplace").decode()


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    own = row.get("episode")
    return {"episode": {"turns": own["turns"], "last": own["last_text"], "ended": own["ended"],
                        "failure": own["failure"], "message": own["message"]}} if own else {}


def _by_prompt(rows: Sequence[Mapping[str, Any]], limit: int) -> tuple[list[dict], int]:
    """Prompts with their responses, whole ones up to the limit, and how many responses."""
    prompts: dict[int, dict] = {}
    for row in rows:
        one = prompts.setdefault(row["prompt_id"], {
            "id": row["prompt_id"], "prompt": row["prompt"], "answer": str(row["answer"]),
            "dataset": row["dataset"] or "", "level": row["level"] or "", "responses": []})
        one["responses"].append({
            "mode": row["mode"], "text": row["completion"], "extracted": row["extracted"],
            "verdict": row["verdict"], "truncated": not row["stopped"], "length": row["length"],
            "reward": row["reward"]} | _episode(row))
    kept: list[dict[str, Any]] = []
    count = 0
    for prompt in prompts.values():
        if limit and kept and count + len(prompt["responses"]) > limit:
            break
        kept.append(prompt)
        count += len(prompt["responses"])
    return kept, count
