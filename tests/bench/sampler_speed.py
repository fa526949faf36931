"""Processor seconds of one thread for sampling equal lengths with a small Llama.

    python tests/bench/sampler_speed.py [--prompt=32] [--new=64] [--repeats=5] [--tiled]

4 layers, width 256, 8 heads, 4 kv heads, feed-forward 1024, vocabulary 4096, tied, float32; 16
prompts x 8 samples, no end of text. `--tiled` asks for the same samples as groups of one, so that
each runs and holds its own prompt: what shared prompts save.
"""

import argparse
import json
import os
import statistics
import time

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before a thread pool counts the cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from dapo_jax import config, types  # noqa: E402
from dapo_jax.models import spec as specs  # noqa: E402
from dapo_jax.models import transformer  # noqa: E402
from dapo_jax.rollout import draw, engine  # noqa: E402
from dapo_jax.runtime import mesh as mesh_lib  # noqa: E402

SPEC = specs.ModelSpec(vocab=4096, layers=4, d_model=256, heads=8, kv_heads=4, head_size=32,
                       ff=1024, rope_base=1e6)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("prompt", 32), ("new", 64), ("prompts", 16), ("samples", 8),
                          ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tiled", action="store_true")
    args = parser.parse_args()
    mesh = mesh_lib.make(config.Mesh())
    params = mesh_lib.put(jax.jit(transformer.init, static_argnums=0)(SPEC, jax.random.key(0)),
                          mesh_lib.param_shardings(mesh, SPEC))
    ids = np.random.default_rng(1).integers(1, SPEC.vocab, (args.prompts, args.prompt), np.int32)
    table = types.PromptTable(tuple(ids), ({},) * args.prompts, ())
    size = 1 if args.tiled else args.samples
    place = np.arange(args.prompts, dtype=np.int32).repeat(args.samples // size)
    plan = types.Plan(prompt=place, visit=np.arange(len(place), dtype=np.int32) // args.prompts,
                      group=np.arange(len(place), dtype=np.int32), size=np.full_like(place, size))
    made = engine.compile_engine(
        SPEC, draw.Sampling(max_new_tokens=args.new, stop_ids=()), mesh, rows=size, share=size,
        slots=(len(place),), buckets=(args.prompt,))
    root = mesh_lib.put(jax.random.key(0), mesh_lib.replicated(mesh))
    seconds = []
    for _ in range(args.repeats + 1):
        begun = time.process_time()
        engine.run(made, params, plan, table=table, root=root, step=0)
        seconds.append(time.process_time() - begun)
    tokens = args.prompts * args.samples * args.new
    median = statistics.median(seconds[1:])
    print(json.dumps({"processor_seconds": [round(one, 3) for one in seconds[1:]],
                      "median": round(median, 3), "tokens_per_processor_second":
                      round(tokens / median), **vars(args)}))


if __name__ == "__main__":
    main()
