"""The environments of several turns, by name."""

import importlib

from dapo_jax import config
from dapo_jax.envs import base, episodes

# By name and not imported: a worker imports the one that it serves.
ENVIRONMENTS = {
    "calculator": "dapo_jax.envs.calculator:ENVIRONMENT",
    "guess_number": "dapo_jax.envs.guess_number:ENVIRONMENT",
    "python": "dapo_jax.envs.python_tool:ENVIRONMENT",
}


def build(cfg: config.Config, split: str) -> tuple[list[base.Record], dict[str, int]]:
    """The configured environment's own problems and how many are missing; ConfigError: none."""
    found = environment(cfg.environment.name)
    if found.records is None:
        raise config.ConfigError(f"environment {found.name!r} brings no problems of its own: set "
                                 "config.task.name to a task whose records it can play")
    count = cfg.task.train_size if split == "train" else cfg.eval.prompts
    made = [record | {"prompt": base.apply_template(cfg.task.template, record["prompt"])}
            for record in found.records(seed=cfg.seed, split=split, count=count)]
    return made, {"missing": count - len(made)}


def environment(name: str) -> episodes.Environment:
    """One of ENVIRONMENTS, or that at "module:NAME"; ConfigError says what of it is missing."""
    module_name, _, attribute = ENVIRONMENTS.get(name, name).partition(":")
    if not module_name or not attribute:
        raise config.ConfigError(f"there is no environment {name!r}"
                                 f"{config.near(name, ENVIRONMENTS)}; name one of "
                                 f"{', '.join(ENVIRONMENTS)} or a 'module:NAME'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise config.ConfigError(f"environment {name!r}: cannot import module {module_name!r}: "
                                 f"{type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, episodes.Environment):
        raise config.ConfigError(f"environment {name!r}: {attribute!r} of {module_name!r} is no "
                                 f"episodes.Environment{config.near(attribute, vars(module))}")
    return found


TASK = base.Task("environment", build, "dapo_jax.envs.math:score",  # the reward is never asked
                 purpose="problems that config.environment brings with it: calculator, python, "
                 "guess_number")
