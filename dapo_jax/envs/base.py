"""What a task is, the reward function it names, and the shaping that is no task's own."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.envs import imports, templates

HELD_OUT = 5  # one in so many problems that are drawn belongs to eval
# prompt (text or chat messages), answer (text); optional: demonstration (text), level
Record = dict[str, Any]
NO_ANSWER = "(no single right answer)"  # for tasks whose scorer compares with none
Build = Callable[[config.Config, str], tuple[list[Record], dict[str, int]]]


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts of a split ("train" or "eval") and how completions of them are scored."""

    name: str
    build: Build  # (cfg, split) -> records with the template applied, counts of what was left out
    reward: str  # "module:function" taking (text, record), giving a number or {"score": number}
    extract: str = "dapo_jax.envs.math:extract"  # "module:function" taking (text,
    # record), giving the answer that the reward looks at, or None
    purpose: str = ""  # a line that lists of tasks show
    examples: tuple[Record, ...] = ()  # to show where `build` needs files


def held_out(key: str) -> bool:
    """Whether the problem of this text belongs to eval, as one in HELD_OUT does: by a hash that
    no seed and no process changes."""
    digest = hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0


def apply_template(template: str, prompt: str) -> str:
    """The prompt inside `template`, a name in templates.TEMPLATES or a text with "{prompt}"."""
    return templates.apply(template, prompt)


def templated(record: Mapping[str, Any], template: str) -> Record:
    """The record with the template around its prompt, or around the user's last message."""
    prompt = record["prompt"]
    if not template:
        return dict(record)
    if isinstance(prompt, str):
        return {**record, "prompt": apply_template(template, prompt)}
    last = max(at for at, message in enumerate(prompt) if message["role"] == "user")
    content = apply_template(template, prompt[last]["content"])
    return {**record, "prompt": [*prompt[:last], {**prompt[last], "content": content},
                                 *prompt[last + 1:]]}


def resolve_reward(dotted: str) -> Callable[[str, Mapping[str, Any]], Any]:
    """The function named "module:function"; ConfigError says what of it is missing."""
    module_name, _, name = dotted.partition(":")
    if not module_name or not name:
        raise config.ConfigError(f"reward {dotted!r} is not of the form 'module:function'")
    try:
        module = imports.module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.split(".")[0]
        hint = ("; put it into the folder where the command is started, or on PYTHONPATH"
                if absent else "")
        raise config.ConfigError(f"reward {dotted!r}: cannot import module {module_name!r}: "
                                 f"{type(error).__name__}: {error}{hint}") from error
    function = getattr(module, name, None)
    if function is None:
        raise config.ConfigError(f"reward {dotted!r}: module {module_name!r} has no {name!r}"
                                 f"{config.near(name, vars(module))}")
    if not callable(function):
        raise config.ConfigError(f"reward {dotted!r}: {name!r} is a {type(function).__name__}, "
                                 "not a function of (text, record)")
    return function


def overlong_penalty(length: int, max_length: int, cache: int, factor: float) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), in [-factor, 0].

    Lengths are in tokens. It falls linearly from 0 at `max_length - cache` to `-factor` at
    `max_length` and stays there; `cache` 0 disables it.
    """
    if not 0 <= cache <= max_length:
        raise ValueError(f"overlong cache = {cache} tokens is outside 0..max_length = {max_length}")
    if factor < 0:
        raise ValueError(f"overlong factor = {factor} is negative: it is the size of the penalty")
    excess = min(length - (max_length - cache), cache)
    return -factor * excess / cache if excess > 0 else 0.0
