"""docs/metrics.md names what runs write, and nothing else."""

import ast
import re

import metric_names
import pytest
import runs
from conftest import ROOT

from dapo_jax import command_line
from dapo_jax.dynamic_sampling import accounts
from dapo_jax.envs import episodes

MANY = ("processes/slowest", "processes/slowest_seconds", "processes/mean_seconds")
# Of episodes: their whole runs are in test_episode_runs.
EPISODES = ("turns/", "environment/", "time/environment_", "time/idle_share", "invalid/env_error",
            "invalid/kind_turn", "invalid/kind_refused")
ALL = {"rollout.mode": "streaming", "sft.steps": 0, "rl.steps": 2, "eval.every": 0,
       "rl.algorithm.kl_coef": 0.1, "rl.algorithm.old_logprobs": "recomputed",
       "buffer.capacity": 5, "buffer.replay": 2, "select.strategies": (("max_variance", 4),),
       "task.reward_weights": (("tests.run_rewards:one", 0.1),), "checkpoint.every": 1}


def texts():
    """Every string of the package; what an f-string puts in is written as X."""
    found = set()
    for path in (ROOT / "dapo_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else "X"
                                  for part in node.values))
    return found


def test_no_name_is_there_twice_and_each_row_says_what_it_is():
    names = metric_names.documented()
    assert len(names) == len(set(names)) > 100
    rows = [line for line in metric_names.PAGE.read_text().splitlines() if line.startswith("| `")]
    assert all(row.replace(r"\|", "").count("|") == 5 and row.split("|")[2].strip() for row in rows)


def test_every_name_of_the_page_is_written_somewhere_in_the_package():
    known = texts() | set(accounts.METRICS) | {f"invalid/kind_{kind}" for kind in episodes.FAILURES}
    # Closed lists, whose f-strings would take any name.
    known -= {"groups/X", "sampling/X", "invalid/kind_X"}
    shapes = {metric_names.pattern(text) for text in known
              if re.match("[a-z_]+/", text) and " " not in text}
    for name in metric_names.documented():
        lower = name.replace("@K", "@4")
        assert lower in known or any(shape.fullmatch(lower) for shape in shapes), name


def test_the_checks_find_what_is_missing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "eval/avg@16": 0.5, "reward/part/my part": 1}\n')
    assert len(metric_names.check_lines(path)) == 3
    path.write_text('{"step": 1, "policy/unheard_of": 0.5}\n')
    with pytest.raises(AssertionError, match="policy/unheard_of"):
        metric_names.check_lines(path)


@pytest.mark.slow
def test_two_runs_that_use_everything_write_all_that_the_page_names(tmp_path, monkeypatch):
    runs.reuse_programs(monkeypatch)
    written = set()
    for name, changes in (("plain", {}), ("all", ALL)):
        assert runs.run(tmp_path / name, changes) == command_line.DONE
        written |= metric_names.check_lines(tmp_path / name / "metrics.jsonl")
    unseen = [name for name in metric_names.documented() if name not in MANY
              and not name.startswith(EPISODES)
              and "SET" not in name
              and not any(metric_names.explained(one, [name]) for one in written)]
    assert not unseen
