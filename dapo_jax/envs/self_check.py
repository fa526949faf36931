"""Before anything is sampled: does the scorer accept an answer in the template's own form?"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_jax import config
from dapo_jax.envs import base, pool, templates

LOG = logging.getLogger(__name__)
CHECKED = 8  # records, the first that have an answer
LOOKED_AT = 1000  # records in which those are looked for: each of a large table is parsed
CALLED = 2  # records, where the form of answers is not known
RIGHT = 0.99  # a reward from here on is that of a right answer


def check(
    workers: pool.Pool, records: Sequence[Mapping[str, Any]], *, template: str,
    extract: Callable[[str, Mapping[str, Any]], str | None],
) -> None:
    """Give the pool's reward the right answers of the first records as the template asks for them.

    Waits until the workers are ready. ConfigError names template and reward if an answer does not
    get reward 1. A right answer may be a worked solution: then what `extract` finds in it counts
    too. A template given as a text has no known form of answer: the reward is only called.
    """
    pool.ready(workers)
    some = itertools.islice(records, LOOKED_AT)
    shown = list(itertools.islice(
        (record for record in some if record["answer"] != base.NO_ANSWER), CHECKED))
    if template not in templates.TEMPLATES:
        _called(workers, shown[:CALLED])
    elif shown:
        _compared(workers, shown, template=template, extract=extract)


def _called(workers: pool.Pool, records: Sequence[Mapping[str, Any]]) -> None:
    """What gives no number ends here (pool.score raises) and not after the first compile."""
    scores = pool.score(workers, [record["answer"] for record in records], records)
    if not scores.valid.all():
        LOG.warning("the reward %r fails on a right answer alone: %s", workers.reward,
                    scores.first_failure)


def _compared(
    workers: pool.Pool, shown: Sequence[Mapping[str, Any]], *, template: str,
    extract: Callable[[str, Mapping[str, Any]], str | None],
) -> None:
    forms = [[templates.answered(template, answer)
              for answer in (record["answer"], extract(record["answer"], record) or "")]
             for record in shown]
    asked = [(text, record) for pair, record in zip(forms, shown, strict=True) for text in pair]
    scores = pool.score(workers, [text for text, _ in asked], [record for _, record in asked])
    best = scores.reward.reshape(-1, 2).max(axis=1)
    valid: Any = scores.valid.reshape(-1, 2).any(axis=1)
    for pair, record, reward, scored in zip(forms, shown, best, valid, strict=True):
        if scored and reward < RIGHT:
            raise config.ConfigError(
                f"config.task.template = {template!r} and the reward {workers.reward!r} do not fit "
                f"together: the right answer {record['answer']!r} in the template's form, "
                f"{pair[0]!r}, gets {reward:g} instead of 1. Choose another template or reward, or "
                "give the template as a text, which is not checked")
    if not valid.any():
        raise config.ConfigError(
            f"the reward {workers.reward!r} fails on right answers in the form of "
            f"config.task.template = {template!r}: {scores.first_failure}")
