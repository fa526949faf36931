"""Processor seconds of one thread for a reply to samples whose contexts grow: appended to what was
kept of them, or with all of it run again.

    python tests/bench/replies_speed.py [--reply=16] [--samples=8] [--repeats=5]

The model of sampler_speed.py; contexts of 128 to 2048 tokens in slots for that many. `kept` is out
of the slot, the reply appended, and into a slot again; `host` is that with a copy on the host
between; `again` a prefill of all tokens in a bucket of just their number, which is the least that
running them again can take, and into a slot.
"""

import argparse
import functools
import json
import os
import statistics
import time

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before a thread pool counts the cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import sampler_speed  # noqa: E402

from dapo_jax import types  # noqa: E402
from dapo_jax.models import transformer  # noqa: E402
from dapo_jax.rollout import decode, parked  # noqa: E402

SPEC, PROMPT, LONGEST = sampler_speed.SPEC, 128, 2048


def programs(samples):
    part = functools.partial
    new = LONGEST - PROMPT + 64
    return {
        "empty": jax.jit(part(decode.empty, SPEC, slots=samples, rows=1, width=PROMPT, new=new,
                              turns=True)),
        "pool": jax.jit(part(parked.empty, SPEC, entries=samples, length=PROMPT + new)),
        "lines": jax.jit(part(parked.lines, 1, PROMPT + new)),
        "store": jax.jit(part(parked.store, 1), donate_argnums=0),
        "extend": jax.jit(part(parked.extend, SPEC, 1), donate_argnums=1),
        "seat": jax.jit(part(parked.seat, 1), donate_argnums=0),
        "prefill": jax.jit(part(transformer.prefill, SPEC))}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("reply", 16), ("samples", 8), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    run, each = programs(args.samples), np.arange(args.samples, dtype=np.int32)
    params = jax.jit(transformer.init, static_argnums=0)(SPEC, jax.random.key(0))
    slots, pool = run["empty"](), run["pool"]()
    for length in (128, 256, 512, 1024, 2048):
        own = length - PROMPT
        full = lambda number: np.full(args.samples, number, np.int32)  # noqa: E731
        tokens = np.random.default_rng(0).integers(
            1, SPEC.vocab, (args.samples, length + args.reply)).astype(np.int32)
        back = types.Resumed(each, each, full(PROMPT), full(own + args.reply), full(5), each, each,
                             each, full(1), full(LONGEST))
        seconds = {"kept": [], "host": [], "again": []}
        for kind in [*seconds] * (args.repeats + 1):
            jax.block_until_ready((slots, pool))
            begun = time.process_time()
            if kind == "again":
                jax.block_until_ready(run["prefill"](params, tokens, full(length + args.reply)))
            else:
                contexts = run["lines"](slots, each, full(max(own - 1, 0)), full(own))
                contexts = jax.device_get(contexts) if kind == "host" else contexts
                pool = run["store"](pool, each, contexts)
                pool = run["extend"](params, pool, each, tokens[:, length:], full(length),
                                     full(args.reply))
            slots = run["seat"](slots, pool, back)
            jax.block_until_ready((slots, pool))
            seconds[kind].append(time.process_time() - begun)
        print(json.dumps({"context": length, "tokens_run": [args.reply, length + args.reply]} | {
            kind: round(statistics.median(one[1:]), 3) for kind, one in seconds.items()}))


if __name__ == "__main__":
    main()
