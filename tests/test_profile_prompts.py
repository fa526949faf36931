"""Pass rates of the training prompts: rows, going on after a stop, and refusals."""

import json

import numpy as np
import pytest
import runs

from dapo_jax import command_line, config, evaluate, profile_prompts, types
from dapo_jax.data import sources
from dapo_jax.rollout import collect

RECORDS = tuple({"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(7))
TABLE = types.PromptTable(tokens=(np.zeros(1, np.int32),) * 7, records=RECORDS, demonstrations=())
SAMPLES = 4


def _round(prompts):
    """Prompt p has p right answers of 4, its last is truncated; prompt 5 has no valid answer, and
    the last one to prompt 4 is not."""
    prompt = np.repeat(np.asarray(prompts, np.int32), SAMPLES)
    sample = np.tile(np.arange(SAMPLES), len(prompts))
    samples = types.no_samples(2).take(np.zeros(0, int))
    columns = {name: np.zeros(len(prompt), getattr(samples, name).dtype)
               for name in ("visit", "sample", "born", "shaped")}
    wide = {name: np.zeros((len(prompt), 2), getattr(samples, name).dtype)
            for name in ("tokens", "loss_mask", "logprobs")}
    valid = (prompt != 5) & ~((prompt == 4) & (sample == 3))
    made = types.Samples(
        **columns, **wide, prompt=prompt, group=prompt, length=sample + 1, valid=valid,
        stopped=sample < SAMPLES - 1, reward=((sample < prompt) & valid).astype(np.float32))
    return collect.Round(made, [""] * len(prompt), None, {})


@pytest.fixture
def sampled(monkeypatch):
    """The prompts of each call."""
    calls = []

    def sample(source, params, prompts, *, step):
        calls.append(prompts.tolist())
        return _round(prompts)

    monkeypatch.setattr(evaluate, "sample", sample)
    return calls


SOURCE = collect.Source(None, None, TABLE, None, None, config.Overlong())


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_counts_what_its_prompt_got(tmp_path, sampled):
    path = tmp_path / "new" / "rates.jsonl"
    assert profile_prompts.profile(SOURCE, None, path, name="n", piece=3) == 7
    assert sampled == [[0, 1, 2], [3, 4, 5], [6]]
    rows = _rows(path)
    assert [row["prompt_key"] for row in rows] == list(map(sources.prompt_key, RECORDS))
    assert [row["successes"] for row in rows] == [0, 1, 2, 3, 3, 0, 4]
    assert [row["pass_rate"] for row in rows] == [0, 0.25, 0.5, 0.75, 1, None, 1]
    assert [(row["trials"], row["invalid"]) for row in rows] == [
        (4, 0), (4, 0), (4, 0), (4, 0), (3, 1), (0, 4), (4, 0)]
    assert {(row["truncated"], row["length"]) for row in rows} == {(1, 2.5)}
    assert profile_prompts.summary(path) == {"prompts": 7, "pass_rate": 3.5 / 6, "never": 1,
                                             "always": 2, "between": 3, "not_scored": 1}


@pytest.mark.parametrize("kept, torn, again", [
    (3, "", [[3, 4, 5], [6]]), (4, '{"prompt_k', [[4, 5, 6]]), (7, "", []), (0, "", [
        [0, 1, 2], [3, 4, 5], [6]])])
def test_it_goes_on_after_the_last_whole_row(tmp_path, sampled, kept, torn, again):
    path = tmp_path / "rates.jsonl"
    profile_prompts.profile(SOURCE, None, path, name="n", piece=3)
    whole = path.read_text()
    path.write_text("".join(line + "\n" for line in whole.splitlines()[:kept]) + torn)
    sampled.clear()
    profile_prompts.profile(SOURCE, None, path, name="n", piece=3)
    assert sampled == again and path.read_text() == whole


def test_a_file_of_another_profile_is_refused_and_left_as_it_is(tmp_path, sampled):
    path = tmp_path / "rates.jsonl"
    profile_prompts.profile(SOURCE, None, path, name="n", piece=9)
    content = path.read_text()
    for name, text, message in (("m", content, "line 1 is of another"), ("n", "x\n", "line 1: "),
                                ("n", content * 2, "line 8 is of another"),
                                ("n", content.split("\n", 1)[1], "line 1 is of another")):
        path.write_text(text)
        with pytest.raises(config.ConfigError, match=message):
            profile_prompts.profile(SOURCE, None, path, name=name, piece=9)
        assert path.read_text() == text


def test_a_profile_is_named_by_all_that_rates_depend_on():
    cfg = runs.configure()

    def name(changes=(), samples=4, workdir="none", step=0):
        return profile_prompts.profile_name(runs.configure(changes), samples=samples,
                                            workdir=workdir, step=step)

    assert name() == profile_prompts.profile_name(cfg, samples=4, workdir="none", step=0)
    assert name({"scoring.workers": 2}) == name({"rl.steps": 3}) == name()
    others = [name({"rollout.temperature": 0.5}), name({"seed": 1}), name(samples=5),
              name({"task.levels": ((2, 1.0),)}), name(step=3), name(workdir="runs/x")]
    assert len({name(), *others}) == 7


def test_the_command_profiles_untrained_weights_and_the_data_can_be_filtered_by_it(
        tmp_path, monkeypatch, capsys):
    runs.reuse_programs(monkeypatch)
    monkeypatch.chdir(runs.ROOT)
    path = tmp_path / "rates.jsonl"
    flags = ["--config=tests/tiny_config.py", "--workdir=none", f"--out={path}", "--samples=4",
             "--config.task.train_size=9"]
    assert profile_prompts.main(flags) == command_line.DONE
    rows, printed = _rows(path), json.loads(capsys.readouterr().out)
    assert len(rows) == printed["prompts"] == 9 and {row["trials"] for row in rows} == {4}
    assert printed["pass_rate"] == pytest.approx(np.mean([row["pass_rate"] for row in rows]))
    cfg = runs.configure({"task.train_size": 9, "task.pass_rates": str(path),
                          "task.pass_rate_range": (0.2, 0.8)})
    chosen = sources.load(cfg, "train")[0]
    between = [row["prompt_key"] for row in rows if 0.2 <= row["pass_rate"] <= 0.8]
    assert [sources.prompt_key(record) for record in chosen] == between
    assert 0 < len(between) < 9
    with pytest.raises(config.ConfigError, match="pass_rates is set"):
        profile_prompts.main([*flags, f"--config.task.pass_rates={path}"])
    with pytest.raises(config.ConfigError, match="--samples=0"):
        profile_prompts.main([*flags[:3], "--samples=0"])
