"""The page of an evaluation: complete, self-contained, and nothing in a text becomes markup."""

import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.runtime import eval_figures, eval_files, eval_page

HOSTILE = ("</script><img src=x onerror=alert(1)>", "<!--<script>", "\u202egnp.exe\x00\x1b[31m",
           "\ud800 lone", "{{ 7 * 7 }} & \u2028", "']]>\"", "<b>bold</b>")


def _row(prompt, text, **changes):
    return {"prompt_id": prompt, "prompt": f"Q{prompt} {text}", "answer": text, "dataset": "set<i>",
            "level": "1", "mode": "sampled", "completion": text, "extracted": None,
            "verdict": "wrong", "stopped": False, "length": 3, "reward": 0.0} | changes


ROWS = [_row(prompt, text, extracted=text if prompt % 2 else None)
        for prompt, text in enumerate(HOSTILE)]
ROWS += [_row(0, "8", mode="greedy", verdict="right", stopped=True, reward=1.0, extracted="8")]
_right = np.array([False])
REPORT = eval_figures.report([eval_figures.Judged(_right, ~_right, _right, np.array([3]), (None,),
                                                  name) for name in ("<i>", "b")])


class _Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.data, self.inside = [], [], "", False

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        self.inside = ("id", "data") in attrs

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        self.data += data * self.inside


def _parsed(page):
    tags = _Tags()
    tags.feed(page)
    return tags, json.loads(tags.data)


def test_every_response_is_on_the_page_and_none_becomes_markup():
    page = eval_page.render("<T>", REPORT, ROWS, limit=0)
    tags, prompts = _parsed(page)
    assert tags.tags.count("script") == 2 and not {"img", "i", "b", "t"} & set(tags.tags)
    assert not tags.links and not re.search(r"https?://|@import|url\(", page)
    assert [one["text"] for prompt in prompts for one in prompt["responses"]] == [
        HOSTILE[0], "8", *HOSTILE[1:]]
    assert [prompt["responses"][0]["extracted"] for prompt in prompts] == [
        text if at % 2 else None for at, text in enumerate(HOSTILE)]
    assert prompts[0]["responses"][1] == {
        "mode": "greedy", "text": "8", "extracted": "8", "verdict": "right", "truncated": False,
        "length": 3, "reward": 1.0}
    assert "Here are" not in page
    page.encode("utf-8")


def test_a_limit_keeps_whole_prompts_and_says_so():
    page = eval_page.render("T", REPORT, ROWS, limit=3)
    _, prompts = _parsed(page)
    assert [len(prompt["responses"]) for prompt in prompts] == [2, 1]
    assert "3 of 8 responses" in page


def test_files_are_written_replaced_and_cut_after_a_step(tmp_path):
    for step in (0, 10, 20):
        eval_files.write(tmp_path, REPORT, ROWS, step=step, page_rows=0 if step == 20 else 9)
    assert eval_files.pages(tmp_path) == ["eval/step_000000.html", "eval/step_000010.html"]
    assert eval_files.newest(tmp_path)["step"] == 20
    (tmp_path / "eval" / "step_000020.json").write_text('{"step": ')
    assert eval_files.newest(tmp_path)["step"] == 10
    eval_files.cut(tmp_path, 0)
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == [
        "step_000000.html", "step_000000.json", "step_000000.md"]
    eval_files.cut(tmp_path, -1)
    assert eval_files.newest(tmp_path) is None and eval_files.newest(tmp_path / "none") is None


def test_a_page_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(config.ConfigError, match="file/page.html"):
        eval_files.write_page(tmp_path / "file" / "page.html", REPORT, ROWS, step=1)


@pytest.mark.slow
def test_a_browser_shows_the_texts_as_texts(tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium to look at the page with")
    path = tmp_path / "page.html"
    path.write_text(eval_page.render("T", REPORT, ROWS, limit=0), encoding="utf-8")
    shown = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=60, check=True).stdout
    body = shown.split("<main", 1)[1].split("</main>")[0]
    assert body.count("<article") == len(HOSTILE) and body.count('class="response"') == len(ROWS)
    assert "<img" not in body and "&lt;img" in body and "\\u202egnp" in body
    assert "8 responses to 7 prompts" in shown
