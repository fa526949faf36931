"""The records of the configuration that say what judges completions: a scorer, or an environment
that answers them turn by turn; see config.py."""

import dataclasses

from dapo_jax.config_fields import option


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The processes that score completions."""

    workers: int = option(1, "processes that score")
    timeout: float = option(10.0, "seconds for one answer, then its process is killed")
    memory_mb: int = option(4096, "megabytes that a scoring process may allocate, 0: no limit; "
                            "beyond them the answer fails")
    on_failure: str = option("mask", "an answer whose scoring failed: leave it out of loss and "
                             "group, or give it failure_reward", ("mask", "reward"))
    failure_reward: float = option(0.0, "used by on_failure=reward")


@dataclasses.dataclass(frozen=True)
class Environment:
    """Episodes of several turns in place of completions that are scored once."""

    name: str = option("", "what answers each turn of the model: calculator, python, guess_number, "
                       "or module:NAME (python -m dapo_jax.envs lists them); empty: nothing, "
                       "completions are scored by the task")
    turns: int = option(8, "most turns of the model in an episode; one that is not over then is "
                        "truncated")
    turn_tokens: int = option(0, "most tokens of one turn; 0: as many as are left of "
                              "rollout.max_new_tokens, which holds all turns and replies")
    seconds: float = option(60.0, "that an episode may wait for its environment, all its turns "
                            "together; beyond them it fails")
    role: str = option("", "chats: whose message a reply is in the chat template; empty: a reply "
                       "is appended as it is", ("", "user", "tool"))
    credit: str = option("terminal", "tokens are credited with the sum of the episode's rewards, "
                         "or with those of their turn and later ones (learner/credit.py)",
                         ("terminal", "discounted"))
    discount: float = option(1.0, "discounted: factor of a reward for each turn that it lies "
                             "ahead")
    demonstrated: float = option(1.0, "sft: share of the prompts whose demonstration is an "
                                 "episode; the others have the task's own")
    reply_lag: int = option(0, "chunks from a turn's end until its reply counts, waited for if "
                               "late; 0: as soon as it is there, and last bits depend on when")
    workers: int = option(1, "calls that the environment answers at once, each in a process of its "
                          "own; one that has taken a quarter of timeout is not counted, so there "
                          "may be twice as many processes, and a spare one for each four")
    timeout: float = option(10.0, "seconds for one call, then its process is killed")
    memory_mb: int = option(4096, "megabytes that such a process may allocate, 0: no limit")
    retries: int = option(2, "of a failed call, where the environment says that one more changes "
                          "nothing")
    backoff: float = option(0.1, "seconds before the first retry, doubled for each further one")
    bound: int = option(16, "failures in a row after which the environment is left alone")
    pause: float = option(30.0, "seconds until it is tried again")
    parked: int = option(64, "samples that wait for a reply whose keys and values the devices keep")
    parked_host: int = option(256, "as many more whose keys and values the host keeps; those of "
                              "any others are made again")
