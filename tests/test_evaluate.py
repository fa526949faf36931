"""Held-out figures: that they follow from the rows, and depend on the parameters alone."""

import json

import numpy as np
import pytest
import runs

from dapo_jax import command_line, config, evaluate, setup
from dapo_jax.data import tables as prompt_tables
from dapo_jax.envs import pool as pools
from dapo_jax.runtime import checkpoint

LEVELS = {"task.levels": ((1, 1.0), (2, 1.0)), "prompts.buckets": (6,), "rollout.slots": (8,)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The work directory of a short run on two levels."""
    workdir = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        runs.reuse_programs(patch)
        assert runs.run(workdir, LEVELS | {"rl.steps": 1}) == command_line.DONE
    return workdir


def _outcomes(changes, times=1):
    """Outcomes of evaluating the untrained parameters."""
    parts = setup.prepare(runs.configure(LEVELS | changes))
    params = setup.initial_params(parts)
    with pools.open(parts.reward, parts.cfg.scoring) as pool:
        evaluator = evaluate.compile_evaluator(parts, pool)
        return [evaluate.evaluate(evaluator, params, step=step) for step in range(times)]


def test_an_evaluation_repeats_exactly_and_depends_on_no_shape(monkeypatch):
    runs.reuse_programs(monkeypatch)
    first, second = _outcomes({}, times=2)
    (other,) = _outcomes({"rollout.slots": (3,), "prompts.buckets": (4, 6)})
    texts = [[row["completion"] for row in one.rows] for one in (first, second, other)]
    assert texts[0] == texts[1] == texts[2]
    assert first.metrics == second.metrics == other.metrics
    assert len(set(texts[0])) > 6


def test_the_figures_follow_from_the_rows(trained):
    path = trained / "samples" / "eval_000005.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    line = runs.lines(trained)[-1]
    sampled = [row for row in rows if row["round"] == 1]
    greedy = [row for row in rows if row["round"] == 2]
    assert (len(sampled), len(greedy)) == (24, 6)
    assert {row["kept"] for row in rows} == {None}
    assert line["eval/avg@4"] == pytest.approx(np.mean([row["reward"] for row in sampled]))
    assert line["eval/greedy"] == pytest.approx(np.mean([row["reward"] for row in greedy]))
    assert line["eval/length"] == pytest.approx(np.mean([row["length"] for row in sampled]))
    assert line["eval/truncated"] == pytest.approx(np.mean([not row["stopped"] for row in sampled]))
    levels = {row["level"] for row in rows}
    assert len(levels) == 2
    for level in levels:
        mean = np.mean([row["reward"] for row in sampled if row["level"] == level])
        assert line[f"eval/level_{level}"] == pytest.approx(mean)
    solved = [any(row["reward"] for row in sampled if row["prompt_id"] == prompt)
              for prompt in range(6)]
    assert line["eval/pass@4"] == pytest.approx(np.mean(solved))
    assert line["eval/avg@4"] < line["eval/pass@2"] < line["eval/pass@4"]


def test_the_command_prints_what_the_run_measured(trained, monkeypatch, capsys):
    runs.reuse_programs(monkeypatch)
    monkeypatch.chdir(runs.ROOT)
    flags = ["--config=tests/tiny_config.py", f"--workdir={trained}", "--config.rl.steps=1",
             "--config.task.levels=((1,1.0),(2,1.0))", "--config.prompts.buckets=(6,)",
             "--config.rollout.slots=(8,)"]
    for wanted, more in ((5, []), (4, ["--checkpoint=4"])):
        assert evaluate.main(flags + more) == command_line.DONE
        printed = json.loads(capsys.readouterr().out)
        assert (printed.pop("step"), printed.pop("prompts")) == (wanted, 6)
        line = next(line for line in runs.lines(trained) if line["step"] == wanted)
        assert printed == {name: value for name, value in line.items()
                           if name.startswith("eval/")}
        report = json.loads((trained / "eval" / f"step_{wanted:06d}.json").read_text())
        assert report["overall"]["avg@4"]["value"] == line["eval/avg@4"]


def test_a_run_leaves_a_table_and_a_page_with_every_response(trained):
    rows = [json.loads(line) for line in
            (trained / "samples" / "eval_000005.jsonl").read_text().splitlines()]
    assert {row["mode"] for row in rows} == {"sampled", "greedy"}
    assert [row["verdict"] for row in rows] == [
        "right" if row["reward"] else "wrong" for row in rows]
    assert [row["extracted"] for row in rows] == [
        row["completion"].split("\n")[0].strip() for row in rows]
    page = (trained / "eval" / "step_000005.html").read_text()
    start = page.index('id="data">') + len('id="data">')
    prompts = json.loads(page[start:page.index("</script>", start)])
    texts = sorted(one["text"] for prompt in prompts for one in prompt["responses"])
    assert texts == sorted(row["completion"] for row in rows)
    table = (trained / "eval" / "step_000005.md").read_text()
    line = next(line for line in runs.lines(trained) if line["step"] == 5)
    assert f"| all | 6 | {line['eval/avg@4']:.3f} (" in table and "| level 2 | " in table


def test_untrained_weights_are_evaluated_into_a_page(tmp_path, monkeypatch, capsys):
    runs.reuse_programs(monkeypatch)
    monkeypatch.chdir(runs.ROOT)
    page = tmp_path / "out" / "page.html"
    flags = ["--config=tests/tiny_config.py", "--workdir=none", f"--page={page}",
             "--config.task.levels=((1,1.0),(2,1.0))", "--config.prompts.buckets=(6,)",
             "--config.rl.prompts_per_step=1000"]  # more than there are: nothing is trained
    assert evaluate.main(flags) == command_line.DONE
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == 0 and 0 <= printed["eval/avg@4"] <= 1
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "page.html", "page.json", "page.md"]
    with pytest.raises(config.ConfigError, match="'boxed' and the reward"):
        evaluate.main([*flags, "--config.task.reward=", "--config.task.template=boxed",
                       "--config.prompts.buckets=(120,)", "--config.tokenizer.kind=bytes"])


def test_parameters_of_a_run_need_neither_its_data_nor_its_controller(tmp_path, monkeypatch):
    parts = setup.prepare(runs.configure())
    manager = checkpoint.open_manager(tmp_path, keep=1)
    state = setup.initial_state(parts)
    checkpoint.save(manager, state)
    checkpoint.close(manager)
    monkeypatch.setattr(prompt_tables, "load", None)
    # Other tables, so another controller, and another optimizer.
    model = setup.open_model(runs.configure({"task.train_size": 7, "rl.optimizer.name": "adafactor",
                                             "sft.optimizer.name": "adafactor"}))
    step, params = evaluate.checkpointed(model, str(tmp_path), wanted=-1)
    assert step == 0
    runs.assert_same_state(params, state.train.params)
