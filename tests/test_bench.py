"""The bench command: what it counts, and that its figures belong together."""

import json
import types

import numpy as np
import pytest
import runs
import tiny

from dapo_jax import bench, command_line, config
from dapo_jax.envs import coin
from dapo_jax.models import cost
from dapo_jax.planning import chips

FLAGS = ["--config=tests/tiny_config.py", "--repeats=2"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    runs.reuse_programs(monkeypatch)
    monkeypatch.chdir(runs.ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("kind, tokens, use", [
    ("rollout", 4 * 4 * 4, 1.0), ("rollout --lengths=uneven", None, None),
    ("update", 4 * 4 * 4, None)])
def test_rates_are_work_over_seconds(kind, tokens, use, tmp_path, capsys):
    out = tmp_path / "bench.json"
    if tokens is None:
        cfg = runs.configure()
        tokens = int(bench._lengths(cfg, uneven=True).sum())
        assert 4 * 4 <= tokens < 4 * 4 * 4
    assert bench.main([*kind.split(), *FLAGS, "--chip=h100", f"--out={out}"]) == command_line.DONE
    figures = json.loads(out.read_text())
    assert figures["tokens"] == tokens and (use is None or figures["row use"] == use)
    assert 0 < figures.get("row use", 1) <= 1
    seconds = figures["seconds"]["median"]
    if kind == "update":
        assert 0 < figures["MFU (h100, 989 Tflop/s)"] < 1e-3
    assert figures["tokens per second"] == pytest.approx(tokens / seconds)
    share = figures["Gop/s"] / figures["Gop/s of one matrix product"]
    assert figures["share of the product's rate"] == pytest.approx(share)
    assert 0 < share < 1
    assert "tokens per second" in capsys.readouterr().out


def test_mfu_is_the_share_of_the_peak_that_the_products_of_an_update_are():
    spec, chip = tiny.SPEC, chips.find("h100")
    prompts, lengths = np.array([5, 1]), np.array([[6, 6], [1, 3]])
    products = 0.0  # by token: the matrices of the blocks, the keys it sees, its logits
    matrices = spec.d_model * (2 * (4 + 2) * 8 + 3 * spec.ff) * spec.layers
    for prompt, row in zip(prompts, lengths):
        places = list(range(1, prompt + 1))
        for length in row:
            places += range(prompt + 1, prompt + length)
            products += 2 * spec.d_model * spec.vocab * length
        products += sum(2 * matrices + 4 * spec.layers * 4 * 8 * keys for keys in places)
    flops = cost.update(spec, prompts, lengths)
    assert flops == 3 * products  # a forward, twice as much back, nothing again
    figures = bench.mfu(flops, 1e-9, chip, devices=2)
    assert figures == {"MFU (h100, 989 Tflop/s)": pytest.approx(3 * products / 2 / 989e12 * 1e9)}
    assert bench.mfu(flops, 1e-9, None, devices=2) == {}


def test_a_device_is_found_by_its_own_name_and_one_like_it_is_not():
    of = lambda kind: chips.of_device(types.SimpleNamespace(device_kind=kind))  # noqa: E731
    assert (of("NVIDIA H100 80GB HBM3").name, of("TPU v5 lite").name) == ("h100", "v5e")
    assert of("NVIDIA H100 PCIe") is None and of("cpu") is None
    assert set(chips.KINDS.values()) <= chips.CHIPS.keys()


@pytest.mark.slow
def test_a_step_is_timed_by_its_phases(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert bench.main(["step", *FLAGS, f"--out={out}"]) == command_line.DONE
    figures = json.loads(out.read_text())
    parts = [figures[f"{phase}: seconds"]["median"] for phase in bench.PHASES]
    assert 0 < max(parts[:-1]) < parts[-1]
    assert figures["tokens sampled per step"]["median"] >= 4 * 4


def test_uneven_lengths_have_a_heavy_tail():
    cfg = runs.configure({"rollout.max_new_tokens": 200, "rl.prompts_per_step": 6000})
    lengths = bench._lengths(cfg, uneven=True)
    assert lengths.shape == (6000, 4) and (lengths == lengths[:, :1]).all()
    # 6000 draws: a standard error of 0.2 % at the limit, of about 2 % in the median.
    assert np.median(lengths) == pytest.approx(20, rel=0.06)
    assert np.mean(lengths == 200) == pytest.approx(0.03, abs=0.008)
    assert lengths.min() >= 1


def test_the_coin_lands_on_both_sides_and_the_same_way_twice():
    texts = [f"{number}\n" for number in range(400)]
    scores = [coin.score(text, {}) for text in texts]
    assert scores == [coin.score(text, {}) for text in texts]
    assert set(scores) == {0.0, 1.0} and 0.4 < np.mean(scores) < 0.6


@pytest.mark.parametrize("flags, told", [
    (["rollouts", *FLAGS], "rollout, update, step"), ([], "rollout, update, step"),
    (["rollout", FLAGS[0], "--repeats=0"], "repeats"),
    (["rollout", *FLAGS, "--lengths=odd"], "equal or uneven"),
    (["update", *FLAGS, "--chip=h10"], "h100"),
    (["update", *FLAGS, "--config.rl.steps=0"], "rl.steps")])
def test_bad_flags_are_refused(flags, told):
    with pytest.raises(config.ConfigError, match=told):
        bench.main(flags)


@pytest.mark.parametrize("kind", ["rollout", "step"])
def test_an_environment_is_refused_with_what_to_do(kind):
    with pytest.raises(config.ConfigError, match=rf"bench {kind} .*'calculator': add "
                       "--config.environment.name= for the same model"):
        bench.main([kind, "--config=configs/calculator.py"])
