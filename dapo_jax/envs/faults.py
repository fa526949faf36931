"""What may go wrong with one sample's score, by kind."""

# Kind -> what it means; the kinds a worker or the pool reports instead of a score.
KINDS = {
    "error": "the reward function raised, or exited by an exception",
    "record": "the record has no usable right answer",
    "value": "the reward was NaN, infinite or beyond f32",
    "type": "the reward was no number",
    "timeout": "no answer within scoring.timeout",
    "memory": "more memory than scoring.memory_mb",
    "ended": "the worker process exited or was killed",
}


class UnusableRecord(ValueError):
    """A record by which nothing can be scored: its sample is invalid, neither right nor wrong."""
