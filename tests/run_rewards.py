"""Reward functions of tests of whole runs; the scoring processes import them."""

import collections
import os
import time

_calls = collections.Counter()


def odd(text, record):
    """Whether the completion holds an odd digit: neither always nor never so by chance."""
    return float(any(character in "13579" for character in text))


def one(text, record):
    """Every group is all right."""
    return 1.0


def by_record(text, record):
    """Records with "keep" score 0, 1, 0, 1, ... in the order of calls, so that every group of one
    worker is informative; the others score 1."""
    if not record["keep"]:
        return 1.0
    _calls[record["prompt"]] += 1
    return float(_calls[record["prompt"]] % 2 == 0)


def fails(text, record):
    """Raises on texts that begin with 0 to 3, gives NaN for 4 and 5, and else is `odd`."""
    if text[:1] in tuple("0123"):
        raise ZeroDivisionError("on purpose")
    return float("nan") if text[:1] in tuple("45") else odd(text, record)


def sevens(text, record):
    """The share of sevens among four characters."""
    return text.count("7") / 4


def hangs(text, record):
    """Never answers for texts that begin with 7, and else is `odd`."""
    if text[:1] == "7":
        time.sleep(60)
    return odd(text, record)


def dies(text, record):
    """Ends its process at texts that begin with 7, and else is `odd`."""
    if text[:1] == "7":
        os._exit(3)
    return odd(text, record)
