import json
import re

import numpy as np
import pytest

from dapo_jax import config, simulate
from dapo_jax.dynamic_sampling import policies

PNG = b"\x89PNG\r\n\x1a\n"


def record(workdir, *, steps=40, pool=60, groups=8, samples=4, seed=0, seconds=(5.0, 0.01)):
    """A run as files: every step samples a pool of prompts and keeps all its samples."""
    rng = np.random.default_rng(seed)
    (workdir / "samples").mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        asked = pool - step % 3
        right = rng.random((asked, samples)) < rng.beta(1, 4, asked)[:, None]
        rows = [{"step": step, "round": 1, "group": 1000 * step + prompt, "prompt_id": prompt,
                 "visit": 0, "sample": sample, "reward": float(right[prompt, sample]),
                 "valid": True, "length": 3}
                for prompt in range(asked) for sample in range(samples)]
        (workdir / "samples" / f"step_{step:06d}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows))
        mixed = int(np.sum(right.any(1) & ~right.all(1)))
        lines.append({"step": step, "phase": "rl", "sampling/asked": asked,
                      "groups/informative": mixed, "sampling/rounds": 1,
                      "sampling/samples": asked * samples, "compiles": 0,
                      "time/rollout": seconds[0] + seconds[1] * asked * samples})
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "config.json").write_text(json.dumps({"rl": {"prompts_per_step": groups}}))
    return workdir


@pytest.fixture
def recorded(tmp_path):
    return record(tmp_path / "run")


def outcomes(path):
    """Informative or not of each prompt in the file, by plain loops."""
    rewards = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rewards.setdefault(row["group"], []).append(row["reward"])
    return [len(set(values)) > 1 for values in rewards.values()]


def test_the_reference_table_is_printed_and_written(tmp_path, capsys):
    assert simulate.main(["--runs=2", "--steps=24", "--samples=8,16", f"--out={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    page = (tmp_path / "reference.md").read_text()
    data = json.loads((tmp_path / "reference.json").read_text())
    assert (tmp_path / "reference.png").read_bytes().startswith(PNG)
    assert [section["title"] for section in data["sections"]] == ["G = 8", "G = 16"]
    for row in data["sections"][0]["rows"]:
        assert row["name"] in shown and row["name"] in page
        assert f"{row['seconds']['mean']:.1f}" in shown
        assert row["saving"]["low"] <= row["saving"]["mean"] <= row["saving"]["high"]
    assert data["sections"][0]["rows"][0]["saving"]["mean"] == 0


def test_the_same_seed_gives_the_same_files(tmp_path):
    for folder in ("a", "b"):
        simulate.main(["--runs=1", "--steps=12", "--samples=8", f"--out={tmp_path / folder}"])
    one, other = ((tmp_path / folder / "reference.md").read_text() for folder in "ab")
    assert one == other


def test_a_replay_takes_the_recorded_outcomes_in_admission_order(recorded, tmp_path, capsys):
    assert simulate.main([f"--replay={recorded}", f"--out={tmp_path}"]) == 0
    rows = {row["name"]: row for row in
            json.loads((tmp_path / "replay.json").read_text())["sections"][0]["rows"]}
    prompts, seconds = [], []
    for step in range(1, 41):
        count, flags = 0, outcomes(recorded / "samples" / f"step_{step:06d}.jsonl")
        for place, good in enumerate(flags, start=1):
            count += good
            if count == 8:
                prompts.append(place)
                seconds.append(5.0 + 0.01 * place * 4)
                break
    assert len(prompts) == 40
    exact = rows["oracle: exact number"]
    assert exact["prompts"] == pytest.approx(np.mean(prompts[8:]))
    assert exact["seconds"]["mean"] == pytest.approx(np.mean(seconds[8:]), rel=1e-6)
    assert exact["seconds"]["low"] < exact["seconds"]["mean"] < exact["seconds"]["high"]
    assert "R2 = 1.000" in capsys.readouterr().out


def test_a_policy_that_asks_for_more_than_the_pool_is_marked(tmp_path, capsys):
    run = record(tmp_path / "run", pool=20)
    assert simulate.main([f"--replay={run}", f"--out={tmp_path}"]) == 0
    rows = {row["name"]: row for row in
            json.loads((tmp_path / "replay.json").read_text())["sections"][0]["rows"]}
    assert rows["fixed 3 N"]["beyond"] == 32
    assert np.all(rows["fixed 3 N"]["seconds"]["mean"] is None)
    assert re.search(r"fixed 3 N \*32", capsys.readouterr().out)


def test_a_shortened_recording_is_refused(recorded):
    path = recorded / "samples" / "step_000003.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:20]))
    with pytest.raises(config.ConfigError, match="step_000003.jsonl holds 20 of the 240 samples"):
        simulate.main([f"--replay={recorded}"])


@pytest.mark.parametrize("text, fault", [
    ('{"group": 1, "reward": 1.0}\n', "line 1: field 'valid'"),
    ('{"group": 1, "reward": 1.0, "valid": true}\n{"gro', "line 2: no JSON object")])
def test_a_bad_line_is_named(recorded, text, fault):
    (recorded / "metrics.jsonl").unlink()
    (recorded / "samples" / "step_000001.jsonl").write_text(text)
    with pytest.raises(config.ConfigError, match=fault):
        simulate.main([f"--replay={recorded}", "--round-cost=1", "--prompt-cost=1"])


def test_nothing_recorded_is_refused(tmp_path):
    for flag, fault in (("--replay", "no run recorded"), ("--fit", "no work directory"),
                        ("--fit-costs", "no work directory")):
        with pytest.raises(config.ConfigError, match=fault):
            simulate.main([f"{flag}={tmp_path}"])


def test_costs_of_a_round_are_found_again(recorded, tmp_path, capsys):
    more = record(tmp_path / "more", steps=3, pool=20)
    assert simulate.main(["--fit-costs", str(recorded), str(more), f"--out={tmp_path}"]) == 0
    found = json.loads((tmp_path / "costs.json").read_text())
    assert (found["round"], found["sample"], found["r_squared"]) == pytest.approx((5.0, 0.01, 1.0))
    shown = capsys.readouterr().out
    assert "--round-cost=5 --prompt-cost=0.08" in shown and "43 steps" in shown


def test_costs_that_the_steps_do_not_tell_apart_are_refused(tmp_path):
    run = record(tmp_path / "run", steps=1)
    with pytest.raises(config.ConfigError, match="do not tell .* give --round-cost"):
        simulate.main([f"--replay={run}"])


def test_a_fit_beats_the_defaults_on_the_steps_fitted_to(recorded, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(simulate.fit, "CANDIDATES", 30)
    monkeypatch.setattr(simulate.fit, "NEIGHBOURS", 5)
    assert simulate.main([f"--fit={recorded}", f"--out={tmp_path}"]) == 0
    study = json.loads((tmp_path / "fit.json").read_text())["study"]
    fitted, defaults = (study["scores"][name][0]["seconds"]
                        for name in ("window, fitted", "window, defaults"))
    assert fitted < defaults
    assert study["held_out"] == 30
    assert max(study["predictor"]["ratio1"], study["predictor"]["ratio2"]) == 1.0
    assert (tmp_path / "fit.png").read_bytes().startswith(PNG)
    assert "--config.dynamic_sampling.predictor.gamma=" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [
    ["--runs=0"], ["--samples=1"], ["--samples=a"], ["--round-cost=-1"], ["--prompt-cost=x"],
    ["--persistent", "--replay=x"], ["--rnus=3"], ["extra"], ["--seed=-1"]], ids=" ".join)
def test_bad_flags_end_with_status_2(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        simulate.main(flags)
    assert caught.value.code == 2
    assert "usage: python -m dapo_jax.simulate" in capsys.readouterr().err


@pytest.mark.parametrize("flags, match", [
    (["--sensitivity"], "belongs to --persistent"),
    (["--sensitivity", "--fit=run"], "belongs to --persistent"),
    (["--replay=run", "--round-cost=5"], "--round-cost and --prompt-cost .* both"),
    ([f"--out={__file__}/page"], "--out: .*cannot be written")], ids=str)
def test_flags_that_do_not_go_together_are_refused_before_anything_is_computed(flags, match):
    with pytest.raises(config.ConfigError, match=match):
        simulate.main(flags)


def test_a_table_of_prompts_is_compared_for_as_many_updates(tmp_path, monkeypatch, capsys):
    small = simulate.persistent.World
    monkeypatch.setattr(simulate.persistent, "World", lambda **more: small(
        **{"prompts": 60, "epochs": 2} | more))
    assert simulate.main(["--persistent", "--sensitivity", "--runs=2", "--groups=8", "--samples=8",
                          f"--out={tmp_path}"]) == 0
    main, larger = json.loads((tmp_path / "persistent.json").read_text())["sections"]
    rows = {row["name"]: row for row in main["rows"]}
    assert rows[policies.WINDOW]["closed"]["mean"] == 0
    assert rows[policies.ORACLE]["closed"]["mean"] == pytest.approx(100)
    assert rows[policies.ORACLE]["seconds"]["mean"] == pytest.approx(77.9 + 1.8 * 8)
    assert len(larger["rows"]) == 4 and larger["rows"][0]["name"] == policies.DEFAULT
    other = json.loads((tmp_path / "sensitivity.json").read_text())["sections"][0]["rows"]
    assert other[0]["closed"] == pytest.approx(rows[policies.DEFAULT]["closed"])
    assert "gap closed, %" in capsys.readouterr().out


def test_help_holds_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        simulate.main(["--help"])
    assert caught.value.code == 0
    assert "python -m dapo_jax.simulate --runs=12" in capsys.readouterr().out


@pytest.mark.slow
def test_the_default_closes_half_the_gap_to_the_oracle_that_draws_only_informative_prompts(
        tmp_path):
    simulate.main(["--persistent", "--runs=4", "--seed=77", f"--out={tmp_path}"])
    sections = json.loads((tmp_path / "persistent.json").read_text())["sections"]
    for section in sections[:3]:
        rows = {row["name"]: row for row in section["rows"]}
        assert rows[policies.DEFAULT]["closed"]["mean"] >= 50, section["title"]
        assert rows[policies.DEFAULT]["age"] <= 0.25  # at most a quarter of a batch, of one step
