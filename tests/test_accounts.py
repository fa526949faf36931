import dataclasses
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import WIDTH, Coins, ids, requests, run, setup

from dapo_jax import config
from dapo_jax.buffer import buffer
from dapo_jax.dynamic_sampling import budget, choice, predictor


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(sorted(budget.KINDS)), chosen=st.sampled_from(sorted(choice.KINDS)),
       predicted=st.sampled_from(sorted(predictor.WANTED)), enabled=st.booleans(),
       groups=st.integers(1, 5), table=st.integers(3, 30),
       carry=st.integers(0, 2), share=st.sampled_from([0.0, 0.5]), rounds=st.integers(1, 4),
       policy=st.sampled_from(["partial", "skip"]), failing=st.sampled_from([0.0, 0.5]),
       epochs=st.integers(0, 2), seed=st.integers(0, 99))
def test_every_prompt_and_sample_is_accounted_for_under_every_budget_and_choice(
        kind, chosen, predicted, enabled, groups, table, carry, share, rounds, policy,
        failing, epochs, seed):
    size = setup(groups=groups, samples=6, enabled=enabled, kind=predicted,
                 epochs=epochs, carry_steps=carry, carry_share=share, at_limit=policy,
                 max_rounds=rounds, max_empty_steps=99,
                 budget=config.Budget(kind=kind, first=2, stages=2, least=3),
                 choice=config.Choice(kind=chosen, skip_growth=0.5))
    rates = np.random.default_rng(seed).choice([0.0, 0.1, 0.5, 1.0], table)
    engine, before = Coins(rates, failing=failing), 0
    for step, (batch, held, report, state) in enumerate(run(engine, size, steps=4, table=table)):
        plans = engine.plans[-report.rounds:] if report.rounds else []
        drawn: dict[int, list[int]] = {}
        prompt_of = {}
        for plan in plans:
            for i, (group, first, count) in enumerate(requests(plan)):
                assert count > 0
                drawn.setdefault(group, []).extend(range(first, first + count))
                prompt_of[group] = int(plan.prompt[i])
        # Each sample number once, without a hole, within the bound.
        assert all(numbers == list(range(len(numbers))) for numbers in drawn.values())
        assert all(len(n) <= budget.most(size.dynamic.budget, 6) for n in drawn.values())
        assert len(set(prompt_of.values())) == len(prompt_of) == report.asked
        assert sum(map(len, drawn.values())) == report.samples and report.rounds <= rounds
        ended = report.all_zero + report.all_one + report.invalid
        assert report.asked + before == (
            (ended if enabled else report.invalid) + report.kept + report.carried
            + report.expired + report.in_flight)
        assert report.asked == ended + report.informative and report.in_flight == 0
        if share and not (policy == "skip" and report.limit):
            assert report.carried <= math.floor(share * groups)
        assert ids(batch) == sorted(ids(batch)) and ids(held) == sorted(ids(held))
        for group in ids(batch):
            mine = batch.take(batch.group == group)
            assert len(mine) >= 2 and mine.valid.all() and (not enabled or np.ptp(mine.reward) > 0)
            assert mine.sample.tolist() == sorted(mine.sample.tolist())
        for group, prompt in prompt_of.items():
            assert state.history.last[prompt] == step and int(state.next_group) > group
        before = report.carried
    assert state.history.visits.sum() == int(state.next_group)
    assert all(len(getattr(held, field.name)) == len(held.group)
               for field in dataclasses.fields(held)) and held.tokens.shape[1] == WIDTH
    assert buffer.groups(held) == before
