"""Which rows of a data set are used: without repeats, split, filtered, mixed, limited.

All of it works on digests of the rows, so that no row has to be in memory.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import cast

import numpy as np

from dapo_jax import config
from dapo_jax.data import files, identity


@dataclasses.dataclass(frozen=True)
class Rows:
    """Good rows of all sources, in their order."""

    source: np.ndarray  # i32[n] number of the source
    identity: np.ndarray  # u64[n, 2] of prompt and answer
    prompt: np.ndarray  # u64[n, 2] of the prompt


def held_out(rows: Rows, count: int, *, name: str) -> np.ndarray:
    """bool[n]: rows of the `count` prompts that are held out.

    Those whose hash comes last are, so neither the order of the file nor the seed moves a prompt
    from one side to the other; all rows of a held-out prompt leave the training.
    """
    first = identity.first_of_each(rows.prompt)
    if len(first) <= count:
        raise config.ConfigError(
            f"{name} has {len(first)} different prompts; config.eval.prompts = {count} of them to "
            "hold out would leave none to train on: name config.task.eval_path or hold out fewer")
    ranked = rows.prompt[first][np.lexsort((rows.prompt[first, 1], rows.prompt[first, 0]))]
    return _at_least(rows.prompt, ranked[len(ranked) - count])


def _at_least(numbers: np.ndarray, least: np.ndarray) -> np.ndarray:
    high, low = numbers[:, 0], numbers[:, 1]
    return (high > least[0]) | ((high == least[0]) & (low >= least[1]))


def mixed(rows: Rows, weights: Sequence[float], *, limit: int, seed: int) -> np.ndarray:
    """Positions of at most `limit` (0: any number) rows, in the order of the table.

    One source gives its first rows. Several give shares as their weights are, as many rows as
    there can be with none repeated; weights that are all 0 mean shares as their sizes are. Which
    rows of a source they are, and how the sources lie among one another, is drawn from the seed.
    """
    if len(weights) == 1:
        return np.arange(len(rows.source))[:limit or None]
    sizes = np.bincount(rows.source, minlength=len(weights))
    counts = shares(sizes, weights, limit=limit)
    order = np.argsort(_drawn(rows.identity, seed), kind="stable")
    taken = [order[rows.source[order] == source][:count] for source, count in enumerate(counts)]
    chosen = np.zeros(len(order), bool)
    chosen[np.concatenate(taken)] = True
    return order[chosen[order]]


def shares(sizes: np.ndarray, weights: Sequence[float], *, limit: int) -> np.ndarray:
    """Rows of each source, at most its size, in the ratio of the weights to within one row."""
    wanted = np.asarray(weights, float) if any(weights) else np.asarray(sizes, float)
    wanted = wanted / wanted.sum()
    total = float(np.min(sizes[wanted > 0] / wanted[wanted > 0]))
    total = int(min(total, limit) if limit else total + 1e-9)
    counts = np.floor(total * wanted + 1e-9).astype(int)
    rest = np.argsort(-(total * wanted - counts), kind="stable")[:total - int(counts.sum())]
    counts[rest] += 1
    return np.minimum(counts, sizes)


def _drawn(numbers: np.ndarray, seed: int) -> np.ndarray:
    """A number for each row that depends on its content and the seed alone: u64[n]."""
    salt = np.frombuffer(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), np.uint64)
    mixed = (numbers[:, 0] ^ salt) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(32)) ^ numbers[:, 1]


# ---------------------------------------------------------------------------------- pass rates


def by_pass_rate(prompts: np.ndarray, path: str, bounds: tuple[float, float]
                 ) -> tuple[np.ndarray, dict[str, int]]:
    """bool[n], which prompts u64[n, 2] have a pass rate within the bounds, and counts of others.

    Several rates of one prompt count by their mean. Prompts that the file does not name are
    left out, and counted apart.
    """
    keys, rates = read_pass_rates(path)
    _, number = np.unique(np.concatenate([keys, prompts]), axis=0, return_inverse=True)
    number = number.reshape(-1)
    known, asked = number[:len(keys)], number[len(keys):]
    size = int(number.max()) + 1
    times = np.bincount(known, minlength=size)
    sums = np.bincount(known, weights=rates, minlength=size)
    rate = np.divide(sums, times, out=np.full(size, np.nan), where=times > 0)[asked]
    inside = (rate >= bounds[0]) & (rate <= bounds[1])  # NaN is outside
    return inside, {"outside pass_rate_range": int((~inside & ~np.isnan(rate)).sum()),
                    "without a pass rate": int(np.isnan(rate).sum())}


def read_pass_rates(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Keys u64[m, 2] and rates f64[m] of a file with "prompt_key" and "pass_rate" in each row.

    A rate of null, of a prompt none of whose answers could be scored, is none. ConfigError names
    the file and the first row that is wrong.
    """
    keys, rates = [], []
    for chunk in files.chunks(path, "jsonl", split=""):
        for _, number, row in files.rows(chunk):
            try:
                key, rate = _pass_rate(row)
            except ValueError as error:
                raise config.ConfigError(f"{chunk.place(number)}: {error}") from error
            if rate is not None:
                keys.append(key)
                rates.append(rate)
    if not keys:
        raise config.ConfigError(f"{path} holds no pass rate")
    return identity.numbers(keys), np.array(rates)


def _pass_rate(row: dict | str) -> tuple[bytes, float | None]:
    if isinstance(row, str):
        raise ValueError(row)
    key, rate = row.get(identity.KEY), row.get("pass_rate")
    try:
        digest = bytes.fromhex(cast(str, key))
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != 16:
        raise ValueError(f"'prompt_key' is {json.dumps(key)}, not 32 hexadecimal digits")
    if "pass_rate" in row and rate is None:
        return digest, None
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise ValueError(f"'pass_rate' is {json.dumps(rate)}, not a number from 0 to 1")
    return digest, float(rate)
