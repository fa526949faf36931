"""The command that measures us beside others: its table, and that a wrong function is refused."""

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))

import side_by_side  # noqa: E402

CORE = min(os.sched_getaffinity(0))
ROWS = [{"peer": "dapo_jax", "versions": "jax 1", "update": [4.0, 2.0]},
        {"peer": "another", "versions": "torch 2", "update": [8.0]},
        {"peer": "dapo_jax", "versions": "jax 1", "update": [3.0]}]


def test_the_table_holds_medians_over_all_rounds_spread_rates_and_ratios():
    lines = side_by_side.table(ROWS, ["update"]).splitlines()
    assert lines[2] == "| dapo_jax (jax 1) | 3.00 (2.00-4.00), 4,096 tok/s |"
    assert lines[3] == "| another (torch 2) | 8.00 (8.00-8.00), 1,536 tok/s, 2.67 x ours |"
    assert "cores of" in lines[-1] and "3 processes, 1 to 3 calls" in lines[-1]


@pytest.mark.parametrize("code, told", [
    ("print('{\"peer\": \"x\", \"check\": -8.0}')", "another function"),
    ("print('{\"peer\": \"x\", \"check\": -8.63741}')", None),
    ("raise SystemExit('no such library')", "status 1:\nno such library")])
def test_who_computes_another_function_or_fails_ends_the_command(
        tmp_path, monkeypatch, code, told):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "of_x.py").write_text(code)
    monkeypatch.setattr(side_by_side, "HERE", tmp_path)
    run = lambda: side_by_side.one("x", sys.executable, core=CORE, repeats=1, parts="")  # noqa: E731
    if told is None:
        assert run()["check"] == -8.63741
    else:
        with pytest.raises(SystemExit, match=told):
            run()
