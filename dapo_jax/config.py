"""The configuration: frozen records, the ConfigDict made from them, and the way back with checks.

The records below, and those of config_task.py, config_learner.py, config_dynamic.py,
config_select.py and config_environment.py, are the only definition of every field, default and
help text. A configuration file returns `default()` with changes; `--config.a.b=v` changes one
more. Unit of every count is in its help text. None means: what the algorithm's preset says.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

import ml_collections
from ml_collections import config_dict

from dapo_jax.config_dynamic import Budget, Choice, DynamicSampling, History, Predictor
from dapo_jax.config_environment import Environment, Scoring
from dapo_jax.config_fields import ConfigError, option, section
from dapo_jax.config_learner import AlgorithmChoice, Phase
from dapo_jax.config_select import Buffer, Select
from dapo_jax.config_task import Task

__all__ = ["AlgorithmChoice", "Budget", "Buffer", "Choice", "ConfigError", "DynamicSampling",
           "Environment", "History", "Phase", "Predictor", "Scoring", "Select", "Task", "option",
           "section"]


@dataclasses.dataclass(frozen=True)
class Model:
    """Whose shape and weights, in which precision, and how it is run."""

    source: str = option("scratch", "where weights come from: random in the shape of the numbers "
                         "below, random in the shape of a known model, a Hugging Face folder of "
                         "safetensors, a GGUF file", ("scratch", "preset", "folder", "gguf"))
    path: str = option("", "folder: the folder; gguf: the file")
    preset: str = option("", "preset: whose shape, such as qwen2.5-0.5b (models/presets.py); plan: "
                         "the shape where the files of another source are not here")
    package: str = option("", "gguf: an installed package that carries one .gguf file, if no path")
    layers: int = option(3, "scratch: blocks")
    d_model: int = option(96, "scratch: width")
    heads: int = option(4, "scratch: query heads")
    kv_heads: int = option(4, "scratch: key and value heads; divides heads")
    head_size: int = option(24, "scratch: width of a head, even")
    ff: int = option(256, "scratch: width of the feed-forward part")
    rope_base: float = option(10000.0, "scratch: base of the rotary positions")
    norm_eps: float = option(1e-5, "scratch: epsilon of RMSNorm")
    tied: bool = option(True, "scratch: the head is the embedding")
    param_dtype: str = option("float32", "parameters; bfloat16 halves their memory, but loses "
                              "optimizer steps below 1/512 of a value", ("float32", "bfloat16"))
    compute_dtype: str = option("auto", "activations and products; auto: bfloat16 on TPU and GPU, "
                                "float32 on CPU", ("auto", "float32", "bfloat16"))
    remat: str = option("none", "what the backward pass recomputes: nothing, all of a block, or "
                        "all but its matrix products", ("none", "full", "dots"))
    attention: str = option("auto", "what computes attention: the plain form, the plain form a "
                            "block of queries at a time, cuDNN, a TPU kernel (models/attention.py);"
                            " auto: by the device", ("auto", "xla", "blocked", "cudnn", "tpu"))
    head_chunk: int = option(0, "tokens whose logits exist at once; 0: as many as take 256 MiB, "
                             "at most 1024")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Training of a low-rank adapter in place of the parameters; see models/lora.py."""

    rank: int = option(0, "of the adapter that is trained; 0: all parameters are trained")
    alpha: float = option(16.0, "what the adapter adds is times alpha / rank")
    patterns: tuple = option(("attention.*", "mlp.*"), "matrices of each block that are adapted, "
                             "such as mlp.up")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """What turns texts into tokens."""

    kind: str = option("characters", "folder: of Hugging Face; gguf: in the model's file",
                       ("characters", "bytes", "gguf", "folder", "sentencepiece"))
    path: str = option("", "folder: with tokenizer.json or tokenizer.model, empty: the model's; "
                       "sentencepiece: the .model file")
    alphabet: str = option("0123456789+-*/=() \n", "characters: one token each")
    chat_template: str = option("", "a jinja template or the path of a .jinja file; empty: the "
                                "one that comes with the tokenizer")
    chat_date: str = option("", "YYYY-MM-DD, told to templates that ask for today's date; empty: "
                            "they are told none")


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """How long a prompt may be."""

    buckets: tuple = option((16,), "prompt lengths in tokens that are compiled; the last is the "
                            "limit")
    too_long: str = option("error", "a prompt over the limit", ("error", "drop"))


@dataclasses.dataclass(frozen=True)
class Rollout:
    """How completions are drawn."""

    max_new_tokens: int = option(8, "tokens of a completion, its stop token included")
    temperature: float = option(1.0, "inside the softmax of sampler and trainer; above 0")
    top_k: int = option(0, "keep the k likeliest tokens; 0: all")
    top_p: float = option(1.0, "keep the likeliest tokens that hold this mass; 1: all")
    min_p: float = option(0.0, "keep tokens with at least this share of the likeliest one's "
                          "probability; 0: all")
    stop: tuple = option(("\n",), "texts that end a completion, besides the tokenizer's own end; "
                         "one of several tokens is found after generating, which goes on to the "
                         "budget")
    slots: tuple = option((8, 16, 32, 64), "prompts that are sampled at once; each number is "
                          "compiled, and the smallest that holds all prompts in work is run")
    rows: int = option(4, "samples of a prompt that are sampled at once; where one ends, the next "
                       "begins (rollout/bounds.py says what that saves); 0: all of them")
    chunk: int = option(32, "tokens drawn in each row before the host looks at them")
    gather: bool = option(True, "hold whole weights on every device of mesh.fsdp while sampling; "
                          "False: gather them for every token, which needs less memory")
    mesh: tuple = option((), "(data, fsdp, tensor) that the sampler splits the devices of "
                         "config.mesh into, such as (2, 1, 4); (): as that does")
    max_context: int = option(0, "tokens of prompt and completion together; 0: no limit")
    mode: str = option("rounds", "how a step of rl samples: requests one after another, or without "
                       "a pause, prompts admitted as scores come in", ("rounds", "streaming"))
    in_flight: str = option("finish", "streaming, prompts that are sampled when the batch is full: "
                            "finish and carry them, or drop and count them", ("finish", "drop"))
    reward_lag: int = option(1, "streaming: chunks after the one that ends a prompt's samples "
                             "until their rewards count; more waits less and decides later")


@dataclasses.dataclass(frozen=True)
class Filter:
    """Which groups are learned from."""

    enable: bool | None = option(None, "drop groups whose rewards are all equal")
    metric: str = option("task", "what must differ: the raw task reward, or the shaped one",
                         ("task", "shaped"))
    tolerance: float = option(1e-6, "rewards that differ by no more count as equal")


@dataclasses.dataclass(frozen=True)
class Overlong:
    """The soft penalty of long completions, and what is done with truncated ones."""

    cache: int = option(0, "tokens before the limit in which the penalty grows; 0: no penalty")
    factor: float = option(1.0, "penalty at the limit")
    mask: bool | None = option(None, "leave truncated samples out of the loss")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is measured on held-out prompts, and when."""

    every: int = option(50, "steps between evaluations; 0: only at the ends of phases")
    prompts: int = option(128, "held-out prompts")
    samples: int = option(8, "samples per prompt: k of avg@k, pass@k, maj@k")
    temperature: float = option(1.0, "of the sampled evaluation")
    top_k: int = option(0, "as in rollout")
    top_p: float = option(1.0, "as in rollout")
    min_p: float = option(0.0, "as in rollout")
    greedy: bool = option(True, "report greedy accuracy too")
    page_rows: int = option(2000, "responses in DIR/eval/step_N.html, those of the first prompts; "
                            "0: no page. All are in DIR/samples")


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """When the state is saved, and what is kept."""

    every: int = option(50, "steps between checkpoints; 0: only at the end and on SIGTERM")
    deadline: float = option(0.0, "seconds from the start on after which the run saves and leaves "
                             "with status 143, as on SIGTERM, when its step ends; 0: none")
    keep: int = option(2, "newest ones kept")
    best: str = option("", "metric of the evaluation by which one more is kept, the highest of "
                       "those saved, such as eval/avg@8 or eval/greedy; empty: none")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How the devices are split."""

    data: int = option(1, "devices that split the batch; -1: all that are left")
    fsdp: int = option(1, "devices that split batch and parameters")
    tensor: int = option(1, "devices that split heads, feed-forward and vocabulary")


@dataclasses.dataclass(frozen=True)
class Processes:
    """How long processes of one run wait for each other."""

    late_seconds: float = option(600.0, "a run of several processes stops where one of them has "
                                 "kept the others waiting for so long")


@dataclasses.dataclass(frozen=True)
class Log:
    """What is written beside the metrics."""

    samples_per_step: int = option(0, "rollouts written per step; 0: all")
    tensorboard: bool = option(True, "write DIR/tb")
    wandb: str = option("", "Weights & Biases: project that gets the metrics too; empty: none")
    profile_steps: tuple = option((), "steps of which DIR/profile gets a timeline (Perfetto)")


@dataclasses.dataclass(frozen=True)
class Config:
    """All of a run."""

    seed: int = option(0, "of weights, order and samples")
    model: Model = section(Model)
    lora: Lora = section(Lora)
    tokenizer: Tokenizer = section(Tokenizer)
    task: Task = section(Task)
    prompts: PromptLimits = section(PromptLimits)
    rollout: Rollout = section(Rollout)
    scoring: Scoring = section(Scoring)
    environment: Environment = section(Environment)
    filter: Filter = section(Filter)
    dynamic_sampling: DynamicSampling = section(DynamicSampling)
    overlong: Overlong = section(Overlong)
    select: Select = section(Select)
    buffer: Buffer = section(Buffer)
    sft: Phase = section(Phase, samples_per_prompt=1, algorithm=AlgorithmChoice(preset="sft"))
    rl: Phase = section(Phase, steps=100)
    eval: Evaluation = section(Evaluation)
    checkpoint: Checkpoints = section(Checkpoints)
    mesh: Mesh = section(Mesh)
    processes: Processes = section(Processes)
    log: Log = section(Log)


def default() -> ml_collections.ConfigDict:
    """Every field with its default, locked against unknown names."""
    return _to_dict(Config())


def _to_dict(record: Any) -> ml_collections.ConfigDict:
    result = ml_collections.ConfigDict()
    types = get_type_hints(type(record))
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            value = _to_dict(value)
        elif value is None:
            value = config_dict.placeholder(plain_type(types[field.name]))
        result[field.name] = value
    return result.lock()


def plain_type(annotation: Any) -> type:
    """`float | None` -> float."""
    return next((a for a in get_args(annotation) if a is not type(None)), annotation)


def near(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: '; did you mean ...?' or nothing."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def to_json(record: Any) -> dict[str, Any]:
    """Nested plain values of a record, as written to DIR/config.json."""
    return json.loads(json.dumps(dataclasses.asdict(record)))


def completion_buckets(phase: Phase, rollout: Rollout) -> tuple[int, ...]:
    """Completion lengths, in tokens, for which the phase's update is compiled."""
    return phase.completion_buckets or (rollout.max_new_tokens,)
