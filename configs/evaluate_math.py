"""How DAPO evaluates: 32 samples a problem at temperature 1.0 and top-p 0.7, on AIME and MATH-500.

    python -m dapo_jax.evaluate --config=configs/evaluate_math.py --workdir=none --page=page.html
        --config.model.path=FOLDER

Wants an accelerator for a model of some size; not run here with one. FOLDER is a Hugging Face
folder, data/ holds the published files (docs/data.md). Each data set is reported apart and all
together, with intervals; page.md is the table, page.json the figures. With --workdir=DIR of a run
trained with this configuration, its checkpoints are evaluated; only that needs the training file.
"""

import ml_collections

from dapo_jax import config


def get_config() -> ml_collections.ConfigDict:
    """The model's own tokenizer, DAPO's prompt, and the answers checked by value."""
    c = config.default()
    c.model.source = "folder"
    c.model.path = "weights/model"
    c.tokenizer.kind = "folder"
    c.task.name = "math"
    c.task.template = "dapo"
    c.task.train_path = "data/dapo-math-17k.parquet"
    c.task.format = "dapo"
    c.task.eval_sources = (
        {"name": "aime", "path": "data/aime-2024.parquet", "format": "aime"},
        {"name": "math500", "path": "data/math-500.jsonl", "format": "math500"})
    c.prompts.buckets = (256, 512, 1024)
    c.prompts.too_long = "drop"
    c.rollout.max_new_tokens = 20480
    c.rollout.stop = ()
    c.rollout.slots = (8, 16)
    c.eval.prompts = 530
    c.eval.samples = 32
    c.eval.temperature = 1.0
    c.eval.top_p = 0.7
    c.eval.greedy = False
    return c
