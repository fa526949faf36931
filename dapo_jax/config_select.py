"""The records of the configuration that say which samples are learned from, and how often."""

import dataclasses

from dapo_jax.config_fields import option


@dataclasses.dataclass(frozen=True)
class Select:
    """Which of the rollouts are learned from; see buffer/select.py."""

    strategies: tuple = option((), "what is left of a step's rollouts before rl learns from them: "
                               "(name, number) pairs, one after another, such as "
                               "(('reject_wrong', 0.5), ('diverse', 4)). reject_wrong: samples of "
                               "at least this task reward; max_variance, diverse, length_strata: "
                               "so many of each group; max_age: groups of at most so many steps; "
                               "capacity: so many groups (buffer/select.py)")
    features: str = option("ngram", "diverse: what tells completions apart: the runs of tokens in "
                           "them, or the mean of the policy's hidden states over their tokens, "
                           "which takes a forward pass of what is selected from",
                           ("ngram", "hidden"))
    ngram: int = option(3, "diverse by runs of tokens: the longest that is counted")
    strata: int = option(4, "length_strata: parts of like length that a group gives equal shares "
                         "of")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Groups that rl learned from and may learn from again; see buffer/replay.py."""

    capacity: int = option(0, "groups that are kept; 0: none")
    replay: int = option(0, "kept groups that each step learns from once more, beside its own")
    max_age: int = option(8, "steps after which a kept group is dropped")
    evict: str = option("oldest", "which groups leave where there are too many, here and in the "
                        "strategy capacity: the oldest, any, or those whose rewards differ least",
                        ("oldest", "random", "least_spread"))
