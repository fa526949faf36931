"""The page of a report: one self-contained HTML file, from the parts in report_page/.

All that is shown is JSON inside it; its script writes texts as text only, so nothing in them can
become markup.
"""

import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import markupsafe

from dapo_jax.runtime import metrics

PARTS = {"style": "page.css", "charts": "charts.js", "script": "page.js"}


def render(payload: Mapping[str, Any]) -> str:
    """The page of what `report_data.payload` made."""
    folder = importlib.resources.files("dapo_jax.runtime") / "report_page"
    parts = {name: markupsafe.Markup((folder / file).read_text(encoding="utf-8"))
             for name, file in PARTS.items()}
    template = (folder / "page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        title=payload["title"], data=embedded(payload), **parts)


def embedded(value: Any) -> markupsafe.Markup:
    """JSON in ASCII, without the signs that could end its element or begin a comment."""
    text = json.dumps(metrics.plain(value), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return markupsafe.Markup(text)
