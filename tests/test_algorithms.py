import dataclasses

import pytest

from dapo_jax import config
from dapo_jax.learner import advantages, algorithms, losses, weights


def resolve(preset="dapo", **changes):
    return algorithms.resolve(config.AlgorithmChoice(preset=preset, **changes),
                              where="rl.algorithm")


def test_presets_hold_the_settings_of_their_papers():
    dapo = algorithms.dapo()
    assert (dapo.clip_low, dapo.clip_high, dapo.dual_clip) == (0.2, 0.28, 10.0)
    assert (dapo.advantage, dapo.weights, dapo.ratio, dapo.ddof) == ("grpo", "token", "token", 1)
    assert dapo.filter and not dapo.mask_overlong and dapo.entropy_coef == 0
    grpo = algorithms.grpo()
    assert (grpo.clip_low, grpo.clip_high, grpo.dual_clip) == (0.2, 0.2, 0.0)
    assert grpo.weights == "sequence" and not grpo.filter
    assert (grpo.kl_coef, grpo.kl_estimator) == (0.04, "k3")
    assert [name for name, preset in algorithms.PRESETS.items() if preset().kl_coef] == ["grpo"]
    cispo = algorithms.cispo()
    assert (cispo.objective, cispo.clip_low, cispo.weights) == ("cispo", 1.0, "token")
    assert cispo.filter and not cispo.dual_clip
    gspo = algorithms.gspo()
    assert (gspo.ratio, gspo.clip_low, gspo.clip_high) == ("sequence", 3e-4, 4e-4)
    dr_grpo = algorithms.dr_grpo()
    assert (dr_grpo.advantage, dr_grpo.weights) == ("dr_grpo", "constant")
    sft = algorithms.sft()
    assert (sft.advantage, sft.ratio, sft.weights) == ("ones", "none", "token")
    assert [name for name, preset in algorithms.PRESETS.items()
            if preset().samples == "demonstrations"] == ["sft"]


@pytest.mark.parametrize("name", algorithms.PRESETS)
def test_every_preset_resolves_to_itself_and_its_names_exist(name):
    algorithm = resolve(name)
    assert algorithm == algorithms.PRESETS[name]() and algorithm.name == name
    assert algorithm.advantage in advantages.ADVANTAGES
    assert algorithm.weights in weights.WEIGHTS
    assert algorithm.ratio in losses.RATIOS and algorithm.objective in losses.OBJECTIVES
    assert algorithm.old_logprobs == "sampler" and algorithm.kl_estimator in losses.KLS


def test_choices_change_their_field_and_no_other():
    changes = {"advantage": "dr_grpo", "weights": "group", "ratio": "sequence", "clip_low": 0.0,
               "clip_high": 0.5, "dual_clip": 0.0, "entropy_coef": 0.01, "leave_one_out": True,
               "advantage_clip": 3.0, "kl_coef": 0.1, "kl_estimator": "k2",
               "old_logprobs": "recomputed", "importance": "sequence", "importance_mode": "mask",
               "importance_min": 0.5, "importance_max": 5.0, "objective": "clip"}
    algorithm = resolve(**changes)
    assert algorithm == dataclasses.replace(algorithms.dapo(), **changes)
    assert resolve(ddof=0).ddof == 0
    assert resolve(weights="microbatch_token").weights == "microbatch_token"
    settings = algorithms.loss_settings(algorithm)
    assert all(getattr(settings, field.name) == changes[field.name]
               for field in dataclasses.fields(settings))
    assert algorithms.advantage_settings(algorithm) == advantages.Settings(
        ddof=1, leave_one_out=True, clip=3.0)


@pytest.mark.parametrize("changes,parts", [
    ({"preset": "dappo"}, ("rl.algorithm.preset", "'dappo'", "dapo")),
    ({"advantage": "gropo"}, ("rl.algorithm.advantage", "grpo")),
    ({"weights": "tokens"}, ("rl.algorithm.weights", "did you mean token")),
    ({"ratio": "xyz"}, ("rl.algorithm.ratio", "token, sequence, none")),
    ({"clip_low": 1.1}, ("rl.algorithm.clip_low", "1.1", "[0, 1]")),
    ({"clip_low": -0.1}, ("rl.algorithm.clip_low",)),
    ({"clip_high": -0.1}, ("rl.algorithm.clip_high",)),
    ({"clip_high": float("nan")}, ("rl.algorithm.clip_high",)),
    ({"dual_clip": 1.0}, ("rl.algorithm.dual_clip", "above 1")),
    ({"dual_clip": -3.0}, ("rl.algorithm.dual_clip",)),
    ({"entropy_coef": float("inf")}, ("rl.algorithm.entropy_coef",)),
    ({"ddof": 2}, ("rl.algorithm.ddof",)),
    ({"ddof": 0, "advantage": "rloo"}, ("rl.algorithm.ddof", "no effect")),
    ({"ratio": "none", "clip_low": 0.1}, ("rl.algorithm.clip_low", "no effect")),
    ({"advantage_clip": -1.0}, ("rl.algorithm.advantage_clip", "0 or more")),
    ({"kl_coef": -1.0}, ("rl.algorithm.kl_coef", "0 or more")),
    ({"kl_coef": float("nan")}, ("rl.algorithm.kl_coef",)),
    ({"kl_coef": 0.1, "kl_estimator": "k4"}, ("rl.algorithm.kl_estimator", "k1")),
    ({"old_logprobs": "new"}, ("rl.algorithm.old_logprobs", "sampler, recomputed")),
    ({"objective": "clipped"}, ("rl.algorithm.objective", "did you mean clip")),
    ({"objective": "none"}, ("rl.algorithm.objective",)),
    ({"old_logprobs": "recomputed", "importance_min": 1.1}, ("rl.algorithm.importance_min",)),
    ({"old_logprobs": "recomputed", "importance_max": 0.9}, ("rl.algorithm.importance_max",)),
    ({"old_logprobs": "recomputed", "importance": "row"}, ("rl.algorithm.importance", "token")),
    ({"importance": "token"}, ("rl.algorithm.importance", "no effect", "old_logprobs")),
    ({"importance_max": 3.0}, ("rl.algorithm.importance_max", "no effect", "sampler")),
    ({"old_logprobs": "recomputed", "importance": "none", "importance_max": 3.0},
     ("rl.algorithm.importance_max", "no effect", "'none'")),
    ({"kl_estimator": "k2"}, ("rl.algorithm.kl_estimator", "no effect", "kl_coef")),
    ({"objective": "cispo", "dual_clip": 3.0}, ("rl.algorithm.dual_clip", "no effect", "cispo")),
    ({"ratio": "none", "objective": "cispo"}, ("rl.algorithm.objective", "no effect")),
    ({"preset": "rloo", "leave_one_out": True}, ("rl.algorithm.leave_one_out", "no effect")),
    ({"advantage": "ones", "advantage_clip": 2.0}, ("rl.algorithm.advantage_clip", "no effect")),
    ({"preset": "sft", "old_logprobs": "recomputed"}, ("rl.algorithm.old_logprobs", "none")),
    ({"preset": "sft", "kl_coef": 0.1, "kl_estimator": "k3_weighted"},
     ("rl.algorithm.kl_estimator", "none")),
    ({"preset": "sft", "advantage": "grpo"}, ("rl.algorithm", "demonstrations")),
    ({"preset": "sft", "ratio": "token"}, ("rl.algorithm", "demonstrations")),
])
def test_a_bad_choice_is_refused_by_the_name_of_its_field(changes, parts):
    with pytest.raises(config.ConfigError) as error:
        resolve(**changes)
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize("preset", sorted(set(algorithms.PRESETS) - {"sft"}))
def test_a_group_of_one_is_refused_where_samples_are_compared(preset):  # B20
    with pytest.raises(config.ConfigError, match=r"config\.rl\.algorithm\.advantage .* is 1"):
        algorithms.check(resolve(preset), samples_per_prompt=1, where="rl.algorithm")
    algorithms.check(resolve(preset), samples_per_prompt=2, where="rl.algorithm")


def test_a_group_of_one_is_refused_where_it_would_be_filtered():
    algorithms.check(resolve("sft"), samples_per_prompt=1, where="sft.algorithm")
    with pytest.raises(config.ConfigError, match="filter"):
        algorithms.check(resolve(advantage="ones"), samples_per_prompt=1, where="rl.algorithm")
