"""The ladder of DAPO's techniques, and the baselines: what their runs are, and their pages."""

import dataclasses
import pathlib

import numpy as np
import pytest
import test_token_loss
from conftest import ROOT

from dapo_jax import command_line, reproduce
from dapo_jax.learner import algorithms
from dapo_jax.studies import ablation, ablation_page, arms, base, baselines, baselines_page, runs
from dapo_jax.studies import arm_findings as findings

TOP, NAIVE = ablation.LADDER[-1], ablation.LADDER[0]


def resolved(plan, arm):
    one = runs.Run(plan.config, pathlib.Path("out"), "x", plan.arms[arm])
    cfg, _ = command_line.parse(runs.flags(one), program="", purpose="",
                                extra={"workdir": command_line.Flag(None, "")})
    return cfg, algorithms.resolve(cfg.rl.algorithm, where="rl.algorithm")


def test_the_top_of_the_ladder_is_dapo_and_its_foot_is_grpo_without_kl():
    cfg, top = resolved(ablation.PLAN, TOP)
    assert top == algorithms.dapo() and cfg.filter.enable is None and cfg.overlong.mask is None
    assert cfg.overlong.cache > 0 and cfg.rl.updates_per_step > 1
    cfg, naive = resolved(ablation.PLAN, NAIVE)
    assert dataclasses.replace(naive, filter=False) == dataclasses.replace(
        algorithms.grpo(), name="dapo", kl_coef=0.0, dual_clip=top.dual_clip)
    assert cfg.filter.enable is False and cfg.overlong.cache == 0 and cfg.overlong.mask is None


# What a reader sees of a rung: clip above, weights, soft penalty, filter.
RUNGS = {"naive GRPO": (0.2, "sequence", False, False),
         "+ soft overlong": (0.2, "sequence", True, False),
         "+ clip-higher": (0.28, "sequence", True, False),
         "+ token loss": (0.28, "token", True, False),
         "+ dynamic sampling": (0.28, "token", True, None)}


@pytest.mark.parametrize("rung", ablation.LADDER)
def test_a_rung_has_its_technique_and_those_below_it(rung):
    cfg, algorithm = resolved(ablation.PLAN, rung)
    assert (algorithm.clip_high, algorithm.weights, cfg.overlong.cache > 0,
            cfg.filter.enable) == RUNGS[rung]
    other, _ = resolved(ablation.PLAN, TOP)
    assert dataclasses.replace(
        cfg, filter=other.filter, overlong=other.overlong, dynamic_sampling=other.dynamic_sampling,
        rl=dataclasses.replace(cfg.rl, algorithm=other.rl.algorithm)) == other


def test_baselines_are_the_presets_without_kl_and_differ_in_nothing_else():
    first, _ = resolved(baselines.PLAN, "grpo")
    for name in baselines.PLAN.arms:
        cfg, algorithm = resolved(baselines.PLAN, name)
        assert algorithm == dataclasses.replace(algorithms.PRESETS[name](), kl_coef=0.0)
        assert not algorithm.filter and cfg.dynamic_sampling.predictor.multiplier == 1.0
        assert dataclasses.replace(cfg, rl=first.rl) == first


def test_folders_of_arms_are_plain_and_different():
    for plan in (ablation.PLAN, baselines.PLAN):
        names = [arms.folder(arm) for arm in plan.arms]
        assert len(set(names)) == len(names) and not set("+ ,/") & set("".join(names))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Three seeds; each rung ends higher than the one below but for the third, which ends lower."""
    out = tmp_path_factory.mktemp("ladder")
    gain = dict(zip(ablation.LADDER, (0.002, 0.003, 0.0025, 0.0035, 0.0055), strict=True))
    return findings.read({arm: {seed: test_token_loss.record(
        out / arms.folder(arm) / str(seed), start=0.3 + 0.01 * seed, gain=gain[arm] + 1e-5 * seed)
        for seed in range(3)} for arm in ablation.LADDER})


def test_each_rung_is_judged_against_the_one_below_it(found):
    lines = {(one.claim, one.setting): one for one in ablation_page.claims(found)}
    ends = [one for one in lines.values() if one.claim.endswith("ends better")]
    assert [one.verdict for one in ends] == ["shown", "contradicted", "shown", "shown"]
    assert "38 to 41" in ends[0].source and "42 to 50" in ends[-1].source
    whole, = (one for one in lines.values() if "all of DAPO" in one.claim)
    evaluations = [step for step in range(4, 41, 4) if step >= 30]  # of the last quarter
    assert whole.difference.mean == pytest.approx(0.0035 * np.mean(evaluations))
    assert whole.verdict == "shown" and "30 to 50" in whole.source


def test_pages_hold_a_line_for_each_claim(found, tmp_path):
    paths = ablation_page.write(tmp_path, found, [], quick=False)
    assert {path.name for path in paths} == {"ablation.md", "ablation.json", "ablation_lines.json",
                                             "ladder.png"}
    text = paths[0].read_text()
    assert all(f"| {arm} | 3 |" in text for arm in ablation.LADDER)
    renamed = findings.Findings(dict(zip(baselines_page.PRESETS, found.arms.values(),
                                         strict=False)), [])
    paths = baselines_page.write(tmp_path, renamed, [], quick=False)
    text = paths[0].read_text()
    assert "| Dr. GRPO ends no worse than GRPO: here, it ends better |" in text
    assert reproduce.main(["page", f"--results={tmp_path}", f"--out={tmp_path / 'docs'}"]) == 0
    page = (tmp_path / "docs/reproduction.md").read_text()
    assert "Without a result here: dynamic_batching, token_loss." in page
    lines = ablation_page.claims(found) + baselines_page.claims(renamed)
    for one in lines:
        assert f"| {one.claim} ({one.setting}) | {one.source} |" in page
    assert f"`reproduce ablation` | held-out accuracy, last quarter: {0.001 * 36:.4f} [" in page


def test_the_published_page_is_made_of_the_published_results(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert reproduce.main(["page", f"--out={tmp_path}"]) == 0
    assert (tmp_path / "reproduction.md").read_text() == (ROOT / "docs/reproduction.md").read_text()


def test_every_study_is_listed_and_a_page_of_nothing_is_refused(tmp_path, capsys):
    assert reproduce.main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in reproduce.STUDIES)
    with pytest.raises(reproduce.config.ConfigError, match="holds no result"):
        reproduce.main(["page", f"--results={tmp_path}", f"--out={tmp_path / 'docs'}"])
    (tmp_path / "ablation_lines.json").write_text('{"lines": [{"claim": "x"}]}')
    with pytest.raises(reproduce.config.ConfigError, match="ablation_lines.json holds no result"):
        reproduce.main(["page", f"--results={tmp_path}", f"--out={tmp_path / 'docs'}"])
    assert not (tmp_path / "docs/reproduction.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("study, runs_of_it", [("ablation", 6), ("baselines", 5)])
def test_the_quick_studies_run(tmp_path, study, runs_of_it):
    assert reproduce.main([study, f"--out={tmp_path}", "--quick", "--seeds=1", "--jobs=2"]) == 0
    assert len(sorted(tmp_path.rglob("metrics.jsonl"))) == runs_of_it
    assert "No figure here means anything" in (tmp_path / f"{study}.md").read_text()


def test_options_name_parts_of_the_study(tmp_path):
    given = reproduce._parser().parse_args(["ablation", f"--out={tmp_path}"])
    assert reproduce._options(given) == base.Options(tmp_path, False, ("ladder",), 3, 1)
