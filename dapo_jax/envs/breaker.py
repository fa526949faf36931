"""A circuit breaker: what keeps failing is left alone for a while, then tried with one call.

Pure functions; seconds are of any one clock.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Breaker:
    """Closed while `failed` is below the bound; else open until `until`, then one call is tried."""

    failed: int = 0  # in a row
    until: float = 0.0  # seconds
    trying: bool = False  # the one call is on its way
    opened: int = 0  # times so far


def allows(breaker: Breaker, now: float, *, bound: int) -> bool:
    """Whether a call may be made; then `asked` says that it is."""
    return breaker.failed < bound or (now >= breaker.until and not breaker.trying)


def asked(breaker: Breaker, *, bound: int) -> Breaker:
    """A call that was allowed is made."""
    return dataclasses.replace(breaker, trying=breaker.failed >= bound)


def told(breaker: Breaker, worked: bool, now: float, *, bound: int, pause: float) -> Breaker:
    """The outcome of a call. It opens at `bound` failures in a row, and when the tried one fails.

    Calls that were on their way when it opened neither open it again nor make the pause longer.
    """
    if worked:
        return Breaker(opened=breaker.opened)
    failed = breaker.failed + 1
    if failed == bound or breaker.trying:
        return Breaker(failed, now + pause, False, breaker.opened + 1)
    return dataclasses.replace(breaker, failed=failed)
