"""A stand-in for rollout and scoring, and steps of the controller with it."""

import numpy as np

from dapo_jax import config, types
from dapo_jax.dynamic_sampling import controller

WIDTH = 3
MIXED, RIGHT, WRONG, BROKEN = "mixed", "right", "wrong", "broken"


def setup(*, groups=4, samples=2, enabled=True, epochs=0, multiplier=3.0,
          kind="fixed", **dynamic) -> controller.CollectSettings:
    return controller.CollectSettings(
        groups=groups, samples_per_prompt=samples, filter_enabled=enabled, filter=config.Filter(),
        dynamic=config.DynamicSampling(
            predictor=config.Predictor(kind=kind, multiplier=multiplier), **dynamic),
        seed=3, epochs=epochs)


class Engine:
    """A stand-in for rollout and scoring: outcome by the number of the group in the run."""

    def __init__(self, outcomes, *, step=0, shuffle=None, lengths=(2,)):
        self.outcomes, self.step, self.shuffle, self.lengths = outcomes, step, shuffle, lengths
        self.plans: list[types.Plan] = []

    def __call__(self, plan: types.Plan) -> types.Samples:
        self.plans.append(plan)
        rows = [row for i in range(len(plan.group)) for row in self.group(plan, i)]
        if self.shuffle is not None:
            rows = [rows[i] for i in self.shuffle.permutation(len(rows))]
        table = {name: np.array([row[name] for row in rows]) for name in (
            "group", "prompt", "visit", "sample", "reward", "valid", "length")}
        n = len(rows)
        return types.Samples(
            tokens=np.tile(table["group"][:, None], (1, WIDTH)).astype(np.int32),
            loss_mask=np.ones((n, WIDTH), bool), logprobs=np.zeros((n, WIDTH), np.float32),
            length=table["length"].astype(np.int32), stopped=np.ones(n, bool),
            reward=table["reward"].astype(np.float32), valid=table["valid"].astype(bool),
            shaped=table["reward"].astype(np.float32) - 0.5,
            **{name: table[name].astype(np.int32) for name in
               ("group", "prompt", "visit", "sample")}, born=np.full(n, self.step, np.int32))

    def group(self, plan, i):
        number = int(plan.group[i])
        outcome = self.outcomes(number) if callable(self.outcomes) else self.outcomes[number]
        for j in range(int(plan.first[i]), int(plan.first[i] + plan.size[i])):
            right = outcome == RIGHT or (outcome == MIXED and j % 2 == 0)
            yield {"group": number, "prompt": int(plan.prompt[i]), "visit": int(plan.visit[i]),
                   "sample": j, "reward": float(right), "valid": outcome != BROKEN,
                   "length": self.lengths[number % len(self.lengths)]}

    @property
    def asked(self):
        return [len(plan.group) for plan in self.plans]


class Coins(Engine):
    """Each sample is right by the prompt's own rate, and its scoring fails now and then: fixed by
    (prompt, visit, sample)."""

    def __init__(self, rates, *, failing=0.0):
        super().__init__(outcomes=lambda group: MIXED)
        self.rates, self.failing = rates, failing

    def group(self, plan, i):
        prompt = int(plan.prompt[i])
        for row in super().group(plan, i):
            luck = np.random.default_rng([prompt, row["visit"], row["sample"]]).random(2)
            valid = bool(luck[1] >= self.failing)
            yield row | {"reward": float(valid and luck[0] < self.rates[prompt]), "valid": valid}


def requests(plan: types.Plan) -> list[tuple[int, int, int]]:
    return list(zip(plan.group.tolist(), plan.first.tolist(), plan.size.tolist()))


def start(table: int, size: controller.CollectSettings):
    state = controller.init(table, seed=size.seed, cfg=size.dynamic)
    return state, types.no_samples(WIDTH)


def run(engine: Engine, size: controller.CollectSettings, *, steps: int, table: int = 200):
    """Steps one after another; reports and batches."""
    state, held = start(table, size)
    for step in range(steps):
        engine.step = step
        state, held, batch, report = controller.collect(state, held, step=step, sample=engine,
                                                        size=size)
        yield batch, held, report, state


def ids(samples: types.Samples) -> list[int]:
    return list(dict.fromkeys(samples.group.tolist()))
