"""How well rows can be used: the sampler's slots played through on given lengths, without a model.

    python -m dapo_jax.rollout.bounds

prints the table by which `rollout.rows` can be chosen. With 256 rows, groups of 16 and heavy-tailed
lengths, R = 16 uses 0.24 of the rows, 8 0.43, 4 0.69, 2 0.88 and 1 0.96: fewer rows a slot wait for
the slot's longest sample. The price is that S = 256 / R prompts are held at once (their caches, and
that many groups must be wanted). 4 is the default: a quarter of a prompt's cache a row, and three
times the use of R = 16. Prompts are run once whatever R is.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

Z_3_PERCENT = 1.8808  # a normal number is larger than this in 3 % of cases


def heavy_tailed(
    groups: int, samples: int, *, limit: int, seed: int = 0, median: float = 0.1
) -> np.ndarray:
    """Lengths i32[groups, samples] in tokens: lognormal, median a share of the limit, 3 % at it."""
    spread = -np.log(median) / Z_3_PERCENT
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(median * limit), spread,
                                                      (groups, samples)))
    return np.clip(np.ceil(drawn), 1, limit).astype(np.int32)


def row_use(
    lengths: Sequence[np.ndarray], *, ladder: Sequence[int], rows: int, chunk: int
) -> float:
    """Live rows / rows computed when groups of these lengths i32[*] (in tokens, a group an array,
    in admission order) go through the sampler.

    A slot streams one group through its rows. Groups take free slots between chunks; a chunk ends
    after `chunk` tokens, or once an eighth of the slots is free while groups wait, or once a
    smaller number of the ladder holds those that are left.
    """
    waiting, live, computed = list(lengths), 0, 0
    left = np.zeros((0, rows), np.int64)  # tokens that each row's sample still takes
    queues: list[list[int]] = []  # of each slot
    while waiting or left.any():
        left, queues = _seated(left, queues, waiting, ladder)
        free = int((left.sum(axis=1) == 0).sum())
        smaller = max((size for size in ladder if size < len(left)), default=0)
        enough = free + max(1, len(left) // 8) if waiting else max(free + 1, len(left) - smaller)
        for _ in range(chunk):
            live, computed = live + int((left > 0).sum()), computed + left.size
            ended = left == 1
            left = np.maximum(left - 1, 0)
            for slot, row in zip(*np.nonzero(ended), strict=True):
                if queues[slot]:
                    left[slot, row] = queues[slot].pop(0)
            if (left.sum(axis=1) == 0).sum() >= min(enough, len(left)):
                break
    return live / computed if computed else 1.0


def _seated(
    left: np.ndarray, queues: list[list[int]], waiting: list[np.ndarray], ladder: Sequence[int]
) -> tuple[np.ndarray, list[list[int]]]:
    """The smallest number of slots that holds all, and waiting groups in its free ones."""
    rows, used = left.shape[1], np.flatnonzero(left.sum(axis=1))
    need = len(used) + len(waiting)
    size = next((size for size in ladder if size >= need), ladder[-1])
    now = np.zeros((size, rows), np.int64)
    now[:len(used)] = left[used]
    queues = [queues[slot] for slot in used] + [[] for _ in range(size - len(used))]
    for slot in range(len(used), size):
        if waiting:
            group = waiting.pop(0).tolist()
            begun, queues[slot] = group[:rows], group[rows:]
            now[slot, :len(begun)] = begun
    return now, queues


def table(
    *, rows_in_all: int = 256, samples: int = 16, limit: int = 256, chunk: int = 32,
    rounds: int = 8
) -> str:
    """Bounds of row use for R that divide a group, at one number of rows S * R in all, with
    `rounds` times S groups; with the largest number of slots alone and with a ladder to an eighth.
    """
    lines = [f"{rows_in_all} rows, groups of {samples}, limit {limit}, chunks of {chunk}, "
             f"{rounds} x S groups", "   R    S  prompts held / row  row use: one size   ladder"]
    for rows in (r for r in (1, 2, 4, 8, 16, 32, 64) if r <= samples):
        slots = rows_in_all // rows
        lengths = heavy_tailed(rounds * slots, samples, limit=limit)
        ladder = tuple(sorted({max(1, slots >> shift) for shift in range(4)}))
        found = [row_use(list(lengths), ladder=sizes, rows=rows, chunk=chunk)
                 for sizes in (ladder[-1:], ladder)]
        lines.append(f"{rows:4} {slots:4}  {1 / rows:18.3f}  {found[0]:17.3f}  {found[1]:7.3f}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.rollout.bounds", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
