"""The report in a real browser: it draws without an error, and within the width that it has."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import test_report

from dapo_jax import report
from dapo_jax.runtime import page, report_data

PROBE = """<script>
window.broken = [];
addEventListener("error", (event) => broken.push(event.message));
addEventListener("securitypolicyviolation", (event) => broken.push(event.violatedDirective));
addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement, of = (name) => document.querySelectorAll(name).length;
  const node = document.querySelector("figure > svg"), box = node.getBoundingClientRect();
  node.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1}));
  const slider = document.getElementById("smooth");
  slider.value = 20;
  slider.dispatchEvent(new Event("input"));
  const readings = {broken, redrawn: !node.isConnected,
    read: node.parentNode.children[1].textContent,
    wide: root.scrollWidth, room: root.clientWidth,
    figures: of("figure > svg"), articles: of("article"), text: document.body.innerText,
    verdict: document.querySelector(".stacked tr:nth-child(2) td:nth-child(3)")
      .getBoundingClientRect().right,
    smoothed: smoothed([1, 5, null, 2, 8, 3, 4], 2),
    apart: apart([1, 2, 3, 4], [1, 3, 10, 20], 1, {runs: [{borders: [[2.5, "rl"]]}]}),
    merged: merged([[[1, 2, 3], [1, 2, 3]], [[2, 3, 4], [4, 9, 9]]]),
    ticks: ticks(0, 0.93, 4), log: logTicks(0.02, 40)};
  parent.postMessage(JSON.stringify(readings), "*");
}, 300));
</script>"""
FRAME = """<script>onmessage = (event) => { document.body.textContent = event.data; }</script>
<body><iframe src="report.html" style="width: %dpx; height: 800px; border: 0"></iframe>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_the_page_within_its_width(tmp_path, width):
    """In a frame, since a headless window is at least 500 wide."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium to look at the page with")
    dirs = test_report.many(tmp_path, {"a": (0.1, 0.2), "b": (0.3, 0.4)},
                            rollout={"stop": ["x" * 90]})
    rows = [test_report.row(0, 1.0, completion=test_report.NASTY, prompt="w" * 300),
            test_report.row(1, 0.0)]
    test_report.make_run(dirs[0], seed=0, accuracy=0.1, samples=rows)
    text = page.render(report_data.payload(report.read(dirs), live=False))
    (tmp_path / "report.html").write_text(text.replace("<style>", PROBE + "<style>", 1))
    (tmp_path / "frame.html").write_text(FRAME % width)
    shown = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900",
         "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True).stdout
    got = json.loads(html.unescape(re.search(r"<body>(.*)</body>", shown, re.S).group(1)))
    assert got["broken"] == [] and width - 20 < got["room"] <= width  # less the scrollbar
    assert got["wide"] == got["room"], "something is wider than the page"
    assert got["redrawn"] and got["read"].startswith("step 4: ") and "a, avg@8 0.15" in got["read"]
    assert got["figures"] == 5 and "0 at every step" in got["text"]
    assert got["articles"] == 4
    assert "<script>alert(1)</script>" in got["text"] and "\\u202e" in got["text"]
    assert "Is it a real difference?" in got["text"] and got["verdict"] <= got["room"]
    want = [1, np.mean([1, 5]), np.mean([1, 5, 2, 8]), np.mean([5, 2, 8, 3]),
            np.mean([2, 8, 3, 4]), np.mean([8, 3, 4]), 4]
    assert got["smoothed"][0] == 1 and got["smoothed"][2:5] == pytest.approx(want[2:5])
    assert got["smoothed"][5:] == pytest.approx(want[5:])
    assert got["apart"] == [1, 3, 10, 20]  # at its ends a phase has no two sides to average
    assert got["merged"] == {"x": [2, 3], "low": [2, 3], "high": [4, 9], "y": [3, 6]}
    assert got["ticks"] == pytest.approx([0, 0.5])
    assert got["log"] == pytest.approx([0.03, 0.1, 0.3, 1, 3, 10, 30][::2])
