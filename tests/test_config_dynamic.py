import pytest

from dapo_jax import config, config_checks


@pytest.mark.parametrize("changes,field", [
    ({"predictor.round_cost": 5.0}, "predictor.prompt_cost"),
    ({"predictor.prompt_cost": 5.0}, "predictor.prompt_cost"),
    ({"predictor.prompt_cost": -1.0}, "predictor.prompt_cost"),
    ({"history.decay": 1.5}, "history.decay"), ({"history.prior_wrong": 0.0}, "prior_wrong"),
    ({"choice.skip_most": 1.0}, "choice.skip_most"), ({"choice.target": -0.1}, "choice.target"),
    ({"budget.tau": 1.0}, "budget.tau"), ({"budget.least": 1}, "budget.least"),
    ({"budget.kind": "hard_more", "budget.least": 33}, "budget.least"),
    ({"budget.kind": "allocate", "budget.least": 17}, "budget.least"),
    ({"budget.kind": "allocate", "budget.most": 12}, "budget.least"),
    ({"budget.kind": "screening", "budget.first": 9, "budget.stages": 2}, "budget.first"),
    ({"budget.kind": "successive", "budget.each": 5, "budget.most": 8}, "budget.each"),
    ({"budget.kind": "more"}, "budget.kind"), ({"carry_share": -0.5}, "carry_share"),
    ({"predictor.window": 10**12}, "predictor.window"), ({"budget.most": 10**12}, "budget.most"),
    ({"predictor.round_cost": 1e300, "predictor.prompt_cost": 1.0}, "predictor.round_cost"),
    ({"predictor.round_cost": 1.0, "predictor.prompt_cost": 1e-300}, "predictor.prompt_cost")])
def test_contradictions_are_refused_by_the_name_of_the_field(changes, field):
    values = config.default()
    values.update_from_flattened_dict({f"dynamic_sampling.{name}": value
                                       for name, value in changes.items()})
    with pytest.raises(config.ConfigError, match=field):
        config_checks.from_dict(values)


def test_a_choice_without_epochs_refuses_them():
    values = config.default()
    values.dynamic_sampling.choice.kind = "difficulty"
    config_checks.from_dict(values)
    values.rl.epochs = 2
    with pytest.raises(config.ConfigError, match="rl.epochs"):
        config_checks.from_dict(values)


@pytest.mark.parametrize("kind", ["fixed", "hard_more", "screening", "successive", "allocate"])
def test_every_budget_works_with_its_defaults(kind):
    values = config.default()
    values.dynamic_sampling.budget.kind = kind
    assert config_checks.from_dict(values).dynamic_sampling.budget.kind == kind
