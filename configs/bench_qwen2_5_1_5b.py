"""Sampling and updates at the shape of Qwen2.5-1.5B on one accelerator, random weights: for timing
alone.

    python -m dapo_jax.bench rollout --config=configs/bench_qwen2_5_1_5b.py --out=FILE.json
    python -m dapo_jax.bench update --config=configs/bench_qwen2_5_1_5b.py --out=FILE.json \\
        --config.model.param_dtype=float32 --config.model.remat=dots --config.rl.microbatch_slots=4
    python -m dapo_jax.plan --config=configs/bench_qwen2_5_1_5b.py --mesh=fsdp:4 --chip=v6e

512 rows (128 prompts at once, 4 samples each) of 512 + 512 tokens in bfloat16; 1024 completions.
Not run here: no accelerator was at hand. To be read from the table: "share of the copy's rate",
the memory-bandwidth bound of decoding (weights and live caches, a prompt's once for its rows). It
needs about 10 GB: the weights twice (stacked and by layer) and the caches.

The update is of the same completions, a prompt and its eight in one slot: 4,608 tokens without
padding, 4,096 of them with logits; "MFU" is what to read, and 0.45 what is aimed at. float32
parameters beside bfloat16 products are what RL trains with. Fewer slots, or remat "full", where
memory is short; "none" where there is plenty: what is computed again counts as no progress.
"""

import ml_collections

from dapo_jax import config


def get_config() -> ml_collections.ConfigDict:
    """Random weights and prompts; the tokenizer and the task are there to have ids and a table."""
    c = config.default()
    c.model.source = "preset"
    c.model.preset = "qwen2.5-1.5b"
    c.model.param_dtype = "bfloat16"
    c.model.compute_dtype = "bfloat16"
    c.model.remat = "full"
    c.tokenizer.kind = "bytes"
    c.prompts.buckets = (512,)
    c.rollout.max_new_tokens = 512
    c.rollout.slots = (128,)
    c.rollout.rows = 4
    c.rollout.chunk = 64
    c.rl.prompts_per_step = 128
    c.rl.samples_per_prompt = 8
    return c
