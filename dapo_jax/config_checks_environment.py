"""What contradicts an environment of several turns; see config_checks.py."""

from dapo_jax import config

# Settings that say how a completion is scored, which is the environment's matter.
_OF_SCORERS = (("task.reward", ""), ("scoring.on_failure", "mask"))


def check(cfg: config.Config) -> None:
    """Refuse what an environment cannot be together with, and its settings without one."""
    own = cfg.environment
    if not own.name:
        _alone(cfg)
        return
    if cfg.rollout.mode != "rounds":
        _refuse(f"config.rollout.mode = {cfg.rollout.mode!r} knows completions of one turn only",
                "set it to 'rounds', where slots of episodes that wait are lent to others too")
    found = {"task.reward": cfg.task.reward, "scoring.on_failure": cfg.scoring.on_failure}
    for name, default in _OF_SCORERS:
        if found[name] != default:
            _refuse(f"config.{name} = {found[name]!r} is of completions that are scored, but "
                    f"config.environment.name = {own.name!r} gives the rewards itself",
                    f"leave it at {default!r}")
    for pair in cfg.task.reward_weights:
        if isinstance(pair, tuple) and pair and ":" in str(pair[0]):
            _refuse(f"config.task.reward_weights names the function {pair[0]!r}, which no "
                    "environment calls", "name parts that its turns give, or format, length, "
                    "repetition")
    if own.turn_tokens > cfg.rollout.max_new_tokens:
        _refuse(f"config.environment.turn_tokens = {own.turn_tokens} is more than all of an "
                f"episode, config.rollout.max_new_tokens = {cfg.rollout.max_new_tokens}",
                "lower it, or set it to 0")
    predictor = cfg.dynamic_sampling.predictor
    if predictor.kind == "cost_optimal" and not predictor.round_cost:
        _refuse("config.dynamic_sampling.predictor.kind = 'cost_optimal' measures what completions "
                "of one turn cost, not episodes", "set round_cost and prompt_cost too")
    if own.credit == "terminal" and own.discount != 1:
        _refuse(f"config.environment.discount = {own.discount:g} has no effect on terminal credit",
                "set config.environment.credit to 'discounted'")
    if cfg.task.chat and not own.role:
        _refuse("config.task.chat writes prompts with a chat template, but config.environment.role "
                "does not say whose message a reply is", "set it to 'user' or 'tool'")


def _alone(cfg: config.Config) -> None:
    own = cfg.environment
    if cfg.task.name == "environment":
        _refuse("config.task.name = 'environment' asks for an environment's own problems, but "
                "there is none", "set config.environment.name")
    for name in ("role", "credit", "discount", "turn_tokens"):
        if getattr(own, name) != getattr(config.Environment(), name):
            _refuse(f"config.environment.{name} = {getattr(own, name)!r} has no effect without an "
                    "environment", "set config.environment.name")


def _refuse(fault: str, advice: str) -> None:
    raise config.ConfigError(f"{fault}: {advice}")
