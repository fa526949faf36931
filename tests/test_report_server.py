"""The report over HTTP: what is served, what is refused, and that it follows a run."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import test_report
from conftest import ROOT

from dapo_jax import config, report
from dapo_jax.runtime import report_server


@pytest.fixture
def workdir(tmp_path):
    made = test_report.make_run(tmp_path / "run")
    (made / "eval").mkdir()
    (made / "eval/step_000004.html").write_text("<p>responses")
    (made / "secret.html").write_text("secret")
    return made


@pytest.fixture
def server(workdir):
    with report_server.opened(report.source([workdir]), host="127.0.0.1", port=0) as opened:
        thread = threading.Thread(target=opened.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{opened.server_address[1]}"
        opened.shutdown()
        thread.join()


def call(address, *, method="GET", host=None):
    """Status, headers and content, whatever the status is."""
    asked = urllib.request.Request(address, method=method)
    if host:
        asked.add_header("Host", host)
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def raw(server, line):
    """The first line of the answer to a request that no client would send."""
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"{line} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        return connection.makefile("rb").readline().decode()


def test_the_page_is_live_and_knows_when_something_is_new(server, workdir):
    status, headers, content = call(f"{server}/")
    data = test_report.Page(content.decode()).data
    assert status == 200 and data["live"] and headers["Cache-Control"] == "no-store"
    assert "text/html" in headers["Content-Type"] and data["panels"]
    known = f"{server}/data.json?known={data['version']}"
    assert call(known)[0] == 204
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "phase": "rl", "policy/loss": 0.25}) + "\n")
    for _ in range(100):  # it is read again only after a rest
        status, _, content = call(known)
        if status == 200:
            break
        time.sleep(0.05)
    fresh = json.loads(content)
    assert status == 200 and fresh["version"] != data["version"]
    assert fresh["runs"][0]["summary"]["steps"].startswith("5,")
    assert call(f"{server}/", method="HEAD")[::2] == (200, b"")


def test_a_long_run_is_not_read_all_the_time(monkeypatch):
    clock, made = [0.0], []
    monkeypatch.setattr(report_server.time, "monotonic", lambda: clock[0])

    def payload():
        clock[0] += 2.0  # a reading takes so long
        made.append(clock[0])
        return {}

    newest = report_server._Newest(report_server.Source(lambda: clock[0], payload, dict))
    for at in (10.0, 12.5, 19.9, 20.1):
        clock[0] = at
        newest.get()
    assert made == [12.0, 22.1]


def test_pages_of_evaluations_are_served_and_nothing_else(server, workdir, tmp_path):
    assert call(f"{server}/run/0/eval/step_000004.html")[::2] == (200, b"<p>responses")
    (tmp_path / "outside.html").write_text("outside")
    (workdir / "eval/step_000009.html").symlink_to(tmp_path / "outside.html")
    for path in ("/secret.html", "/run/0/secret.html", "/run/0/config.json", "/run/1/eval/"
                 "step_000004.html", "/run/0/eval/step_000009.html", "/run/0/metrics.jsonl",
                 "/run/0/eval/../secret.html", "/run/0/eval/%2e%2e/secret.html", "//etc/passwd"):
        status, _, content = call(server + path)
        assert status == 404 and b"secret" not in content, path
    for line in ("GET ../secret.html", "GET /../../etc/passwd", "GET /run/0/eval/..%2fsecret.html",
                 "GET http://127.0.0.1/run/0/secret.html"):
        assert " 404 " in raw(server, line), line


def test_it_is_read_only_and_for_this_machines_names_only(server, workdir):
    before = sorted(path.stat().st_mtime_ns for path in workdir.rglob("*"))
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert call(f"{server}/", method=method)[0] == 501
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
        assert call(f"{server}/data.json", host=host)[0] == 403
    for host in ("localhost:9", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert call(f"{server}/data.json", host=host)[0] == 200
    assert before == sorted(path.stat().st_mtime_ns for path in workdir.rglob("*"))


def test_what_cannot_be_read_now_is_an_answer_and_no_end(server, workdir):
    text = (workdir / "config.json").read_text()
    (workdir / "config.json").write_text("{")
    status, _, content = call(f"{server}/data.json")
    assert status == 503 and b"config.json is no JSON object" in content
    (workdir / "config.json").write_text(text)
    assert call(f"{server}/data.json")[0] == 200


def test_a_run_without_a_step_yet_is_waited_for_and_no_run_is_refused(tmp_path):
    (tmp_path / "new").mkdir()
    shown = report.source([tmp_path / "new"]).payload()
    assert shown["runs"][0]["notes"] == ["there are no metrics yet"] and not shown["panels"]
    with pytest.raises(config.ConfigError, match="no work directory of a run"):
        report.serve([tmp_path / "none"], host="127.0.0.1", port=0)


def test_a_port_that_is_taken_and_flags_without_effect_are_refused(workdir, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert report.main([str(workdir), "--serve", f"--port={port}"]) == 2
    assert f"--port={port}" in capsys.readouterr().err
    for flags in (["--port=1"], ["--host=x"], ["--serve", "--out=x"]):
        with pytest.raises(SystemExit):
            report.main([str(workdir), *flags])
        assert "no effect" in capsys.readouterr().err


def test_the_command_listens_on_loopback_until_it_is_interrupted(workdir):
    process = subprocess.Popen(
        [sys.executable, "-m", "dapo_jax.report", str(workdir), "--serve", "--port=0"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        # Tests that run in a shell's background inherit that it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        address = process.stdout.readline().split()[0].rstrip("/")
        assert address.startswith("http://127.0.0.1:") and call(f"{address}/")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and process.stderr.read() == "ended\n"
    finally:
        process.kill()
        process.wait()
    assert not (workdir / "report.html").exists()


@pytest.mark.slow
def test_a_browser_draws_what_is_new_without_being_told(workdir):
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium to look at the page with")
    source, calls = report.source([workdir]), []

    def payload():
        calls.append(None)
        if len(calls) == 2:  # the page itself was the first
            with (workdir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 777, "phase": "rl", "policy/loss": 0.25}) + "\n")
        return source.payload()

    changing = report_server.Source(lambda: len(calls), payload, source.files)
    with report_server.opened(changing, host="127.0.0.1", port=0) as opened:
        threading.Thread(target=opened.serve_forever, daemon=True).start()
        shown = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={workdir / 'profile'}", "--virtual-time-budget=8000", "--dump-dom",
             f"http://127.0.0.1:{opened.server_address[1]}/"],
            capture_output=True, text=True, timeout=120, check=True).stdout
        opened.shutdown()
    body = shown.split('<script type="application/json"')[0]
    assert "777, 1 sft" in body and "live, as of" in body
    assert 'href="run/0/eval/step_000004.html"' not in body  # no evaluation's figures to link from
