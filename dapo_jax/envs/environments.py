"""The environments of several turns, by name."""

import inspect
import json
import traceback
from collections.abc import Callable
from typing import Any

from dapo_jax import config
from dapo_jax.envs import base, episodes, imports

# By name and not imported: a worker imports the one that it serves.
ENVIRONMENTS = {
    "calculator": "dapo_jax.envs.calculator:ENVIRONMENT",
    "guess_number": "dapo_jax.envs.guess_number:ENVIRONMENT",
    "python": "dapo_jax.envs.python_tool:ENVIRONMENT",
}


def build(cfg: config.Config, split: str) -> tuple[list[base.Record], dict[str, int]]:
    """The configured environment's own problems and how many are missing; ConfigError: none."""
    found = environment(cfg.environment.name)
    make = found.records
    if make is None:
        raise config.ConfigError(f"environment {found.name!r} brings no problems of its own: set "
                                 "config.task.name to a task whose records it can play")
    count = cfg.task.train_size if split == "train" else cfg.eval.prompts
    problems = asked(found, "records",
                     lambda: list(make(seed=cfg.seed, split=split, count=count)))
    for place, record in enumerate(problems):
        if fault := _fault_of_record(record):
            raise config.ConfigError(f"environment {found.name!r}: problem {place} that records "
                                     f"made for {split!r} {fault}")
    made = [base.templated(record, cfg.task.template) for record in problems[:count]]
    return made, {"missing": count - len(made)}


def ready(found: episodes.Environment) -> None:
    """ConfigError: the environment cannot be run on this machine, whatever its `ready` raised."""
    asked(found, "ready", found.ready)


def asked(found: episodes.Environment, what: str, call: Callable[[], Any]) -> Any:
    """What a function of the environment gives in this process; ConfigError: it raised."""
    try:
        return call()
    except config.ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise config.ConfigError(
            f"environment {found.name!r}: {what} raised {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno})") from error


def _fault_of_record(record: Any) -> str:
    """Why a problem can be neither asked nor logged and played again; empty if it can."""
    if not (isinstance(record, dict) and {"prompt", "answer"} <= record.keys()
            and isinstance(record["answer"], str) and _is_prompt(record["prompt"])):
        return (f"is {record!r:.80}; it must be a dict whose 'prompt' is a text or messages, one "
                "of them the user's, and whose 'answer' is a text, "
                f"{base.NO_ANSWER!r} where no one answer is right")
    for name, value in record.items():
        try:
            same = isinstance(name, str) and json.loads(json.dumps(value)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            return (f"has {name!r:.40}: {value!r:.80}, which is not the same after it was written "
                    "as JSON and read again; logs are played again from there")
    return ""


def environment(name: str) -> episodes.Environment:
    """One of ENVIRONMENTS, or that at "module:NAME"; ConfigError says what of it is missing."""
    module_name, _, attribute = ENVIRONMENTS.get(name, name).partition(":")
    if not module_name or not attribute:
        raise config.ConfigError(f"there is no environment {name!r}"
                                 f"{config.near(name, ENVIRONMENTS)}; name one of "
                                 f"{', '.join(ENVIRONMENTS)} or a 'module:NAME'")
    try:
        module = imports.module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise config.ConfigError(f"environment {name!r}: cannot import module {module_name!r}: "
                                 f"{type(error).__name__}: {error}{_hint(module_name, error)}"
                                 ) from error
    found = getattr(module, attribute, None)
    if not isinstance(found, episodes.Environment):
        own = [one for one, value in vars(module).items()
               if isinstance(value, episodes.Environment)]
        raise config.ConfigError(f"environment {name!r}: {attribute!r} of {module_name!r} is no "
                                 f"episodes.Environment; it has {', '.join(own) or 'none'}"
                                 f"{config.near(attribute, own)}")
    _check(name, found)
    return found


def _hint(module: str, error: BaseException) -> str:
    if module.endswith(".py") or "/" in module or "\\" in module:
        return ": write it as for import, without .py, such as 'my_games:TWICE'"
    if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
        return ": modules are looked for in this folder and in those of PYTHONPATH"
    return ""


def _check(name: str, found: episodes.Environment) -> None:
    """ConfigError for functions that cannot be called as those of an environment are."""
    for what, given, called in (("start", found.start, "(record, seed)"),
                                ("step", found.step, "(state, text)")):
        if not callable(given):
            raise config.ConfigError(f"environment {name!r}: {what} is {given!r:.80}, which cannot "
                                     "be called")
        if inspect.iscoroutinefunction(given):
            raise config.ConfigError(f"environment {name!r}: {what} is a coroutine; it must be a "
                                     "plain function")
        try:
            inspect.signature(given).bind(None, None)
        except TypeError as error:
            raise config.ConfigError(f"environment {name!r}: {what} takes "
                                     f"{inspect.signature(given)}; it is called with {called}: "
                                     f"{error}") from error
        except ValueError:  # written in C: it does not tell
            continue
    if not isinstance(found.parts, tuple) or not all(isinstance(one, str) for one in found.parts):
        raise config.ConfigError(f"environment {name!r}: parts = {found.parts!r:.80} must be a "
                                 "tuple of names")


def _is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (episodes.are_messages(prompt) and any(
        message["role"] == "user" for message in prompt))


TASK = base.Task("environment", build, "dapo_jax.envs.math:score",  # the reward is never asked
                 purpose="problems that config.environment brings with it: calculator, python, "
                 "guess_number")
