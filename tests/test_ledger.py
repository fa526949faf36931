"""What the host writes down of chunks, by cases with right answers."""

import types as types_lib

import numpy as np
import pytest

from dapo_jax import types
from dapo_jax.dynamic_sampling import controller
from dapo_jax.envs import pool as pools
from dapo_jax.rollout import collect, ledger

EOS = 2  # also the id that pads


def written(completions, *, width, budgets):
    """The samples after all tokens came in one chunk, a slot a completion."""
    count, steps = len(completions), max(map(len, completions))
    ids = np.arange(count, dtype=np.int32)
    ones = np.ones(count, np.int32)
    book = ledger.add(ledger.new(width), types.Plan(
        ids, 0 * ids, ids, ones, np.array(budgets, np.int32), 0 * ids), step=1)
    token, sample = np.full((2, steps, count, 1), EOS), np.full((steps, count, 1), -1)
    for slot, tokens in enumerate(completions):
        token[0, :len(tokens), slot, 0] = tokens
        sample[:len(tokens), slot, 0] = 0
    place = np.broadcast_to(np.arange(steps)[:, None, None], sample.shape)
    chunk = types.Chunk(token[0], np.where(sample == 0, -1.0, 0.0), sample, place,
                        np.int32(steps), np.ones(count, bool))
    done = ledger.write(book, chunk, ids, stop_ids=(EOS,))
    assert done.tolist() == ids.tolist()
    return book.samples


def truncated(samples, monkeypatch):
    """The metric of a step that sampled these."""
    monkeypatch.setattr(controller, "metrics", lambda report: {})
    yes = np.ones(len(samples), bool)
    scores = pools.Scores(yes.astype("f4"), yes, errors=0, timeouts=0, first_failure="")
    one = types_lib.SimpleNamespace(samples=samples, texts=["x"] * len(yes), scores=scores,
                                    finals=["x"] * len(yes), played=None)
    use = types_lib.SimpleNamespace(row_use=1.0, chunks=1, weights_bytes=0)
    none = samples.take(~yes)
    return collect.metrics(collect.Collected(
        None, none, none, None, [one], {"rollout": 1.0, "reward": 0.0}, use),
        step=1)["length/truncated"]


@pytest.mark.parametrize("completions, budgets, lost", [
    ([[5, 6, 7, 2], [5, 6, 7, 8], [5, 2]], 4, [False, True, False]),
    ([[5, 6, 2], [5, 2], [7, 8, 2]], 4, [False] * 3),
    ([[5, 6], [2], [5, 2]], 2, [True, False, False])])  # a context of 6, prompts of 4 tokens
def test_truncated_is_what_reached_its_limit_without_a_stop(
        monkeypatch, completions, budgets, lost):
    """B47"""
    samples = written(completions, width=4, budgets=[budgets] * 3)
    assert (~samples.stopped).tolist() == lost
    assert samples.length.tolist() == list(map(len, completions))
    assert truncated(samples, monkeypatch) == pytest.approx(sum(lost) / 3)


def test_masks_come_from_lengths_and_not_from_the_id_that_pads():
    """B44"""
    samples = written([[5, 7, 2], [5, 7, 9, 4, 6], [2]], width=5, budgets=[5] * 3)
    assert samples.loss_mask.astype(int).tolist() == [
        [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert samples.length.tolist() == [3, 5, 1]
    assert (~samples.stopped).tolist() == [False, True, False]
