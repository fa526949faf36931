"""The record of the configuration that says what the prompts are; see config.py."""

import dataclasses

from dapo_jax.config_fields import option


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked, in which words, and how it is scored."""

    name: str = option("arithmetic", "what is asked and how it is scored",
                       ("arithmetic", "columns", "countdown", "environment", "reasoning_gym",
                        "math", "multiple_choice", "jsonl"))
    dataset: str = option("", "reasoning_gym: the data set (python -m dapo_jax.envs lists them), "
                          "or several with commas between them")
    options: tuple = option((), "countdown, reasoning_gym: the task's own settings, pairs of name "
                            "and value such as (('max_terms', 2),)")
    train_path: str = option("", "files: the training file (.jsonl, .parquet), or the folder of a "
                             "data set that TFDS built")
    eval_path: str = option("", "files: the held-out file; empty: hold out eval.prompts training "
                            "prompts")
    train_split: str = option("train", "TFDS: split of train_path, or a part such as train[:10%]")
    eval_split: str = option("test", "TFDS: split of eval_path")
    train_sources: tuple = option((), "files: several instead of train_path, each a dict of path "
                                  "and, where it differs from this section, split, format, "
                                  "prompt_field, answer_field, answer_rule, demonstration_field, "
                                  "and weight, its share")
    eval_sources: tuple = option((), "files: the same instead of eval_path")
    format: str = option("fields", "files: laid out as the published data set of that name "
                         "(docs/data.md), or by the fields below",
                         ("fields", "gsm8k", "math", "math500", "aime", "dapo"))
    prompt_field: str = option("prompt", "files: field of the prompt, a text or chat messages; a.b "
                               "is field b of the object a")
    answer_field: str = option("answer", "files: field of the right answer")
    answer_rule: str = option("whole", "files: the answer is the whole field, or what follows its "
                              "last ####, or what is in its last \\boxed{}",
                              ("whole", "hashes", "boxed"))
    demonstration_field: str = option("demonstration", "files: field of a worked answer, for SFT")
    where: tuple = option((), "files: (field, values) pairs; rows with another value are left out")
    pass_rates: str = option("", "a JSON Lines file of prompt_key and pass_rate: only training "
                             "prompts whose rate lies in pass_rate_range are used")
    pass_rate_range: tuple = option((0.0, 1.0), "with pass_rates: lowest and highest rate")
    template: str = option("{prompt}", "text around each prompt, or around the user's last "
                           "message; or a name: plain, line, qa, dapo, boxed, hashes, tags, chat "
                           "(envs/templates.py)")
    chat: bool = option(False, "give prompts that are texts to the chat template, as the user's "
                        "message; messages always are")
    reward: str = option("", "module:function(text, record); empty: the task's own")
    reward_weights: tuple = option((), "(part, weight) pairs, summed to the shaped reward that is "
                                   "learned from: task (1 if not named), format, length, "
                                   "repetition, a key of the dict that the reward returns, or "
                                   "module:function")
    bad_records: str = option("error", "a bad line ends the start, or is counted and left out",
                              ("error", "skip"))
    train_size: int = option(20000, "training problems drawn; of files: limit, 0 none")
    levels: tuple = option(((1, 1.0), (2, 1.0), (3, 1.0)), "arithmetic, columns: (digits, share) "
                            "pairs; digits of both operands, or (left, right)")
    operators: str = option("+", "arithmetic: drawn evenly from these")
    digits: int = option(0, "arithmetic: every number is filled with leading zeros to this many")
    spaced: bool = option(False, "arithmetic: '12 + 35 = ' instead of '12+35='")
    shots: int = option(0, "solved examples before the question (not of files)")
