"""DAPO as in its paper (arXiv 2503.14476): Qwen2.5-32B on DAPO-Math-17k, AIME 2024 held out.

    python -m dapo_jax.train --config=configs/dapo_qwen2_5_32b.py --workdir=DIR
    python -m dapo_jax.plan --config=configs/dapo_qwen2_5_32b.py --chip=v5p

Wants a slice of 256 TPU v5p, which was not at hand: not run, only planned (docs/planner.md, also
for 128 H100). weights/ holds the model as a Hugging Face folder, data/ the published files
(docs/data.md). Reported by the paper: avg@32 of 50 on AIME 2024.
"""

import ml_collections

from dapo_jax import config


def get_config() -> ml_collections.ConfigDict:
    """512 prompts x 16 samples of up to 20,480 tokens a step, 16 updates of 512 samples."""
    c = config.default()
    c.model.source = "folder"
    c.model.path = "weights/Qwen2.5-32B"
    c.model.preset = "qwen2.5-32b"  # to plan without the weights
    c.model.remat = "full"
    c.tokenizer.kind = "folder"
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 8, 8, 4

    c.task.name = "math"
    c.task.template = "dapo"
    c.task.train_path = "data/dapo-math-17k.parquet"
    c.task.format = "dapo"
    c.task.train_size = 0
    c.task.eval_sources = ({"path": "data/aime-2024.parquet", "format": "aime"},)
    c.prompts.buckets = (256, 512, 2048)
    c.prompts.too_long = "drop"
    c.rollout.max_new_tokens = 20480  # 16384, and 4096 in which the penalty grows
    c.rollout.stop = ()
    c.rollout.slots = (64, 128, 256)
    c.rollout.rows = 4
    c.rollout.chunk = 128
    c.overlong.cache = 4096

    c.rl.prompts_per_step = 512
    c.rl.samples_per_prompt = 16
    c.rl.updates_per_step = 16
    c.rl.packed_prompts = 2048
    c.rl.microbatch_slots = 64
    c.rl.optimizer.learning_rate = 1e-6
    c.rl.optimizer.warmup_updates = 20
    c.rl.optimizer.weight_decay = 0.1
    c.rl.optimizer.clip_norm = 1.0
    c.rl.algorithm.dual_clip = 10.0
    c.rl.steps = 400
    c.eval.samples = 32
    c.eval.top_p = 0.7
    c.eval.prompts = 30
    c.eval.greedy = False
    return c
