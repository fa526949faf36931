"""The page of a report: one self-contained HTML file, every text in it escaped."""

import base64
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import markupsafe

TEXT_LIMIT = 1500  # characters of a prompt or completion that are shown

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #1c2128; --faint: #5d6673; --paper: #fff; --line: #d9dde3;
  --card: #f6f7f9; --right: #1f7a3f; --wrong: #b0372f; --control: #a05a00;
  --told: #ece4f6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e6ea; --faint: #9aa3af; --paper: #16191d; --line: #343a42; --card: #1f2329;
    --right: #62c587; --wrong: #f0857c; --control: #e0a458;
    --told: #35293f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p, figcaption { color: var(--faint); }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
  gap: 1rem; }
figure { margin: 0; }
figure img { width: 100%; height: auto; display: block; background: #fff; border: 1px solid
  var(--line); border-radius: 6px; box-sizing: border-box; }
figcaption { font-size: .8rem; margin-top: .2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .7rem; text-align: left;
  vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
.text { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  min-width: 10rem; max-width: 34rem; }
.told { background: var(--told); }
.right { color: var(--right); } .wrong { color: var(--wrong); } .control { color: var(--control); }
details { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem .8rem; margin: .6rem 0; }
summary { cursor: pointer; }
pre { overflow-x: auto; font-size: .8rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ subtitle }}</p>
<div class="wide"><table>
<tr><th></th>{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr>
{% for label in labels %}<tr><th>{{ label }}</th>
{% for run in runs %}<td>{{ run.summary.get(label, "–") }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% for run in runs %}{% for note in run.notes %}<p>{{ run.name }}: {{ note }}</p>
{% endfor %}{% endfor %}
<h2>Curves</h2>
<p>A dashed line marks where a new phase begins. Long curves are drawn faint, with their running
mean on top.</p>
<div class="plots">
{% for plot in plots %}<figure>
<img src="data:image/png;base64,{{ plot.image }}" alt="{{ plot.title }}">
{% if plot.note %}<figcaption>{{ plot.note }}</figcaption>{% endif %}</figure>
{% endfor %}</div>
{% if missing %}
<p>Left out, as no run has their metrics: {{ missing | join(", ") }}.</p>
{% endif %}
{% for run in runs %}{% if run.evaluation %}
<h2>Held-out evaluation{% if runs | length > 1 %} of {{ run.name }}{% endif %}</h2>
<p>After step {{ run.evaluation.step }}, {{ run.evaluation.samples }} answers a prompt; in brackets
95% bootstrap intervals over prompts.{% if run.evaluation.page %} Every response, with what was
found in it: {{ run.name }}/{{ run.evaluation.page }}.{% endif %}</p>
<div class="wide"><table>
<tr>{% for cell in run.evaluation.head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in run.evaluation.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}{% endfor %}
<h2>Sample completions</h2>
{% if runs | map(attribute="samples") | sum(start=()) | selectattr("turns") | list %}<p>What the
model was told between its turns stands on <span class="told">this ground</span>.</p>{% endif %}
{% for run in runs %}{% if run.samples %}
{% if runs | length > 1 %}<h3>{{ run.name }}</h3>{% endif %}
<div class="wide"><table>
<tr><th>step</th><th>prompt</th><th>completion</th><th>answer</th><th>reward</th><th>tokens</th>
<th>stopped</th><th>kept</th></tr>
{% for row in run.samples %}<tr><td>{{ row.place }}</td>
<td class="text">{{ row.prompt | visible }}</td>
<td class="text">{% for turn in row.turns %}{{ turn.text | visible }}{% if turn.reply and not
turn.done %}<span class="told">{{ turn.reply | visible }}</span>{% endif %}
{%- else %}{{ row.completion | visible }}{% endfor %}{% if row.failure %} <span class="control">
{{- row.failure | visible }}</span>{% endif %}</td>
<td class="text">{{ row.answer | visible }}</td>
<td class="{{ 'right' if row.right else 'wrong' }}">{{ row.reward }}</td>
<td>{{ row.length }}</td><td>{{ row.stopped }}</td><td>{{ row.kept }}</td></tr>
{% endfor %}</table></div>
{% else %}<p>{{ run.name }}: no samples were written.</p>{% endif %}{% endfor %}
<h2>Configuration</h2>
{% for run in runs %}<details><summary>{{ run.name }}</summary>
<pre>{{ run.config }}</pre></details>
{% endfor %}
</body>
</html>
"""


def render(*, title: str, subtitle: str, runs: Sequence[Mapping[str, Any]],
           plots: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> str:
    """The page as text.

    A run has name, summary (label to text), notes, samples (rows with place, prompt, completion,
    answer, reward, right, length, stopped, kept, turns, failure), evaluation (None, or step,
    samples, head and rows of a table, page) and config (text); a plot has title, note and image
    (PNG bytes).
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["visible"] = _visible
    labels = list(dict.fromkeys(label for run in runs for label in run["summary"]))
    inlined = [{**plot, "image": base64.b64encode(plot["image"]).decode()} for plot in plots]
    page = environment.from_string(TEMPLATE).render(
        title=title, subtitle=subtitle, runs=runs, plots=inlined, labels=labels, missing=missing)
    return page.encode("utf-8", "backslashreplace").decode()


def _visible(value: Any) -> markupsafe.Markup:
    """Escaped text whose control characters are drawn as signs; a long text is shortened."""
    text = "" if value is None else str(value)
    left = len(text) - TEXT_LIMIT
    signs = [_sign(character) for character in text[:TEXT_LIMIT]]
    if left > 0:
        signs.append(_marked(f" … {left} more characters"))
    return markupsafe.Markup("").join(signs)


def _sign(character: str) -> Any:
    code = ord(character)
    if character == "\n":
        return _marked("↵") + "\n"
    if code < 0x20:
        return _marked(chr(0x2400 + code))
    if code == 0x7F:
        return _marked("\u2421")
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return _marked(f"\\u{code:04x}")
    return character


def _marked(sign: str) -> Any:
    return markupsafe.Markup('<span class="control">{}</span>').format(sign)
