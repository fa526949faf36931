"""Settings of a sweep: combinations against loops written out here."""

import math

import pytest

from dapo_jax import config, sweeps


def test_a_grid_is_every_combination_with_the_last_field_fastest():
    found = sweeps.grid({"config.a": (1, 2), "b.c": ["x", "y", "z"]})
    assert found == [{"a": a, "b.c": c} for a in (1, 2) for c in ("x", "y", "z")]


def test_zip_takes_first_with_first_and_refuses_unequal_lengths():
    assert sweeps.zip_({"a": (1, 2), "b": range(3, 5)}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    with pytest.raises(config.ConfigError, match="a has 2, b has 3"):
        sweeps.zip_({"a": (1, 2), "b": (1, 2, 3)})


def test_products_and_chains_compose():
    rates, seeds = sweeps.grid({"rate": (0.1, 0.2)}), sweeps.seeds(2)
    other = sweeps.zip_({"kind": ("p",), "size": (3,)})
    found = sweeps.product(sweeps.chain(rates, other), seeds)
    assert found == [one | {"seed": seed} for one in (
        {"rate": 0.1}, {"rate": 0.2}, {"kind": "p", "size": 3}) for seed in (0, 1)]
    with pytest.raises(config.ConfigError, match="seed: set by two"):
        sweeps.product(seeds, sweeps.grid({"config.seed": (3,)}))


def test_a_condition_multiplies_only_the_settings_that_have_it():
    kinds = sweeps.grid({"kind": ("fixed", "window"), "seed": (0, 1)})
    found = sweeps.conditional(kinds, {"config.kind": "window"}, sweeps.grid({"width": (3, 5)}))
    assert found == [{"kind": "fixed", "seed": 0}, {"kind": "fixed", "seed": 1},
                     *({"kind": "window", "seed": seed, "width": width}
                       for seed in (0, 1) for width in (3, 5))]
    for absent in ({"kind": "windo"}, {"kinds": "window"}):
        with pytest.raises(config.ConfigError, match="no setting has"):
            sweeps.conditional(kinds, absent, [{"width": 3}])


DRAWS = {"rate": sweeps.log_uniform(1e-5, 1e-3), "share": sweeps.uniform(0.2, 0.4),
         "count": sweeps.integers(1, 3), "kind": sweeps.choice(("a", "b"))}


def test_draws_lie_where_they_are_asked_for():
    found = sweeps.random(400, DRAWS)
    assert all(1e-5 <= one["rate"] < 1e-3 and 0.2 <= one["share"] < 0.4 for one in found)
    assert {one["count"] for one in found} == {1, 2, 3}
    assert {one["kind"] for one in found} == {"a", "b"}
    assert {type(value) for value in found[0].values()} == {float, int, str}
    # Half of the rates lie below the geometric mean; 0.1 is four standard deviations.
    below = sum(one["rate"] < 1e-4 for one in found) / len(found)
    assert below == pytest.approx(0.5, abs=0.1)


def test_draws_are_the_same_again_and_do_not_depend_on_other_fields_or_the_count():
    found = sweeps.random(5, DRAWS, seed=1)
    assert found == sweeps.random(5, DRAWS, seed=1) != sweeps.random(5, DRAWS)
    assert found[:3] == sweeps.random(3, DRAWS, seed=1)
    for name, draw in DRAWS.items():
        alone = sweeps.random(5, {f"config.{name}": draw}, seed=1)
        assert [one[name] for one in alone] == [one[name] for one in found]
    assert len({one["rate"] for one in found}) == 5


@pytest.mark.parametrize("wrong, words", [
    (lambda: sweeps.grid({"a": "text"}), "a: 'text' is no list"),
    (lambda: sweeps.grid({"a": 3}), "a: 3 is no list"),
    (lambda: sweeps.uniform(2, 1), "uniform: from 2 to 1"),
    (lambda: sweeps.log_uniform(0, 1), "log_uniform: from 0"),
    (lambda: sweeps.integers(math.nan, 1), "integers"),
    (lambda: sweeps.choice(()), "no options"),
    (lambda: sweeps.random(0, {}), "count is 0"),
    (lambda: sweeps.seeds(0), "count is 0"),
    (lambda: sweeps.checked({"a": 1}, "f.py"), "f.py: .*must return a list.*not dict"),
    (lambda: sweeps.checked([], "f.py"), "f.py: .*no setting"),
    (lambda: sweeps.checked([{"a": 1}, {"b": 1}, {"config.a": 1}], "f.py"), "settings 0 and 2"),
])
def test_what_is_wrong_is_named(wrong, words):
    with pytest.raises(config.ConfigError, match=words):
        wrong()
