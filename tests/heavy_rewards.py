"""A reward function whose module takes 100 MB when it is imported."""

BALLAST = bytes(100 << 20)


def score(text, record):
    return float(len(text))
