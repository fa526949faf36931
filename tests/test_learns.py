"""Tiny runs learn what they are taught: held-out accuracy and reward rise from a fixed seed."""

import json

import numpy as np
import pytest
import runs

from dapo_jax import command_line

QUIET = {"eval.every": 0, "checkpoint.every": 0}


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    runs.reuse_programs(monkeypatch)


def test_demonstrations_raise_the_accuracy_on_held_out_prompts(tmp_path):
    rows = [{"prompt": f"{number:03}=", "answer": f"{number:03}"[::-1]} for number in range(1000)]
    path = tmp_path / "reversed.jsonl"
    path.write_text("".join(json.dumps(row | {"demonstration": row["answer"]}) + "\n"
                            for row in rows))
    changes = QUIET | {
        "task.name": "jsonl", "task.train_path": str(path), "task.train_size": 0, "task.reward": "",
        "rl.steps": 0, "sft.steps": 100, "sft.prompts_per_step": 40, "sft.microbatch_slots": 40,
        "eval.prompts": 50}
    assert runs.run(tmp_path / "run", changes) == command_line.DONE
    first, last = runs.lines(tmp_path / "run")[0], runs.lines(tmp_path / "run")[-1]
    assert first["eval/greedy"] == 0
    assert last["eval/greedy"] >= 0.9


def test_rewards_raise_the_reward(tmp_path):
    changes = QUIET | {
        "task.reward": "tests.run_rewards:sevens", "sft.steps": 0, "rl.steps": 30,
        "rl.prompts_per_step": 8, "rl.microbatch_slots": 8, "dynamic_sampling.carry_steps": 0}
    assert runs.run(tmp_path, changes) == command_line.DONE
    rewards = [line["reward/mean"] for line in runs.steps(tmp_path)]
    assert np.mean(rewards[:3]) < 0.35
    assert np.mean(rewards[-3:]) > 0.8
