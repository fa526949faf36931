"""Fields that are set although the rest of the configuration leaves nothing that reads them.

Left alone is what a configuration file carries for another setting of one of its own fields: the
shape of a `scratch` model, problems of another task, an environment that is switched off, slots of
a microbatch that is bounded by tokens, a phase without steps.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator

from dapo_jax import config


@dataclasses.dataclass(frozen=True)
class Need:
    """What fields need in order to have an effect: a value of one other field."""

    fields: tuple[str, ...]
    of: str
    met: Callable[[config.Config], bool]
    advice: str  # what to set `of` to


def _one_of(section: str, names: str, of: str, *values: str) -> Need:
    """Fields of a section, named in one text, that are read where field `of` has such a value."""
    read = operator.attrgetter(of)
    return Need(_within(section, names), of, lambda cfg: read(cfg) in values,
                f"set that to {' or '.join(map(repr, values))}")


def _above_0(section: str, names: str, of: str) -> Need:
    read = operator.attrgetter(of)
    return Need(_within(section, names), of, lambda cfg: read(cfg) > 0, "set that above 0")


def _strategy(field: str, name: str) -> Need:
    """A field that one strategy of config.select reads."""
    return Need((field,), "select.strategies", lambda cfg: _has(cfg, name),
                f"add ({name!r}, 2) to that")


def _within(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _has(cfg: config.Config, strategy: str) -> bool:
    return any(isinstance(entry, tuple) and entry[:1] == (strategy,)
               for entry in cfg.select.strategies)


_DYNAMIC = "dynamic_sampling"
_FILES = ("math", "multiple_choice", "jsonl")
NEEDS: tuple[Need, ...] = (
    Need(("model.path", "model.package", "model.preset"), "model.source",
         lambda cfg: cfg.model.source != "scratch", "set that to 'folder', 'gguf' or 'preset'"),
    _above_0("lora", "alpha patterns", "lora.rank"),
    _one_of("tokenizer", "path", "tokenizer.kind", "folder", "sentencepiece"),
    _one_of("task", "digits spaced", "task.name", "arithmetic", "columns"),
    _one_of("task", "format prompt_field answer_field answer_rule demonstration_field train_split "
            "eval_split", "task.name", *_FILES),
    Need(("task.pass_rate_range",), "task.pass_rates", lambda cfg: bool(cfg.task.pass_rates),
         "name a file of rates there"),
    _one_of("rollout", "in_flight reward_lag", "rollout.mode", "streaming"),
    _one_of("scoring", "failure_reward", "scoring.on_failure", "reward"),
    _above_0("overlong", "factor", "overlong.cache"),
    _one_of(f"{_DYNAMIC}.predictor", "eager alpha gamma ratio1 ratio2 q",
            f"{_DYNAMIC}.predictor.kind", "window"),
    _one_of(f"{_DYNAMIC}.predictor", "round_cost prompt_cost", f"{_DYNAMIC}.predictor.kind",
            "cost_optimal"),
    _one_of(f"{_DYNAMIC}.budget", "tau", f"{_DYNAMIC}.budget.kind", "hard_more"),
    _one_of(f"{_DYNAMIC}.budget", "least", f"{_DYNAMIC}.budget.kind", "hard_more", "allocate"),
    _one_of(f"{_DYNAMIC}.budget", "most", f"{_DYNAMIC}.budget.kind", "hard_more", "successive",
            "allocate"),
    _one_of(f"{_DYNAMIC}.budget", "first", f"{_DYNAMIC}.budget.kind", "screening", "successive"),
    _one_of(f"{_DYNAMIC}.budget", "stages", f"{_DYNAMIC}.budget.kind", "screening"),
    _one_of(f"{_DYNAMIC}.budget", "each", f"{_DYNAMIC}.budget.kind", "successive"),
    _one_of(f"{_DYNAMIC}.choice", "skip_growth skip_most", f"{_DYNAMIC}.choice.kind", "skip"),
    _one_of(f"{_DYNAMIC}.choice", "target longest_gap", f"{_DYNAMIC}.choice.kind", "difficulty"),
    _above_0(_DYNAMIC, "carry_share", f"{_DYNAMIC}.carry_steps"),
    _strategy("select.ngram", "diverse"),
    _one_of("select", "ngram", "select.features", "ngram"),
    _strategy("select.strata", "length_strata"),
    _above_0("buffer", "max_age", "buffer.capacity"),
    Need(("buffer.evict",), "buffer.capacity",
         lambda cfg: cfg.buffer.capacity > 0 or _has(cfg, "capacity"), "set that above 0"),
    *(need for phase in ("sft", "rl") for need in (
        _one_of(f"{phase}.optimizer", "end_factor", f"{phase}.optimizer.schedule", "linear",
                "cosine"),
        _one_of(f"{phase}.optimizer", "b1 b2 eps", f"{phase}.optimizer.name", "adamw"),
        _above_0(f"{phase}.optimizer", "no_decay", f"{phase}.optimizer.weight_decay"),
        _above_0(phase, "packed_rows", f"{phase}.packed_prompts"))),
)


def check(cfg: config.Config) -> None:
    """ConfigError for a field that is set away from its default where nothing reads it; it names
    both fields and what to set."""
    for need, name in _unread(cfg):
        raise config.ConfigError(
            f"config.{name} = {_value(cfg, name)!r} has no effect with config.{need.of} = "
            f"{_value(cfg, need.of)!r}: {need.advice}, or leave config.{name} out")


def _unread(cfg: config.Config) -> Iterator[tuple[Need, str]]:
    default = config.Config()
    return ((need, name) for need in NEEDS if not need.met(cfg) for name in need.fields
            if _value(cfg, name) != _value(default, name))


def _value(cfg: config.Config, name: str) -> object:
    return operator.attrgetter(name)(cfg)
