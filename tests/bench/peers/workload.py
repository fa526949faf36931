"""What all of them do: one small Llama, one set of weights, prompts and completions. numpy alone.

16 prompts x 8 samples, prompt 32, 64 new tokens, float32, no end of text. Every script prints one
line of JSON with processor seconds by part, and with `check`, the mean log-probability of fixed
tokens, which must be the same for all. side_by_side.py binds each to one processor core.
"""

import argparse
import json
import statistics
import time

import numpy as np

VOCAB, LAYERS, WIDTH, HEADS, KV_HEADS, SIZE, FF = 4096, 4, 256, 8, 4, 32, 1024
ROPE, EPS, PAD, END = 1e6, 1e-5, 0, VOCAB - 1
PROMPTS, GROUP, PROMPT, NEW = 16, 8, 32, 64
SAMPLES, TRAINED = PROMPTS * GROUP, PROMPTS * GROUP * (PROMPT + NEW)
RATE, CLIP_LOW, CLIP_HIGH, NORM = 1e-6, 0.2, 0.28, 1.0
PARTS = ("rollout", "update", "step")


def weights():
    """Matrices with the inputs first, by layer; embedding and head are tied."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (0.05 * rng.standard_normal(shape)).astype(np.float32)
    shapes = {"q": (WIDTH, HEADS, SIZE), "k": (WIDTH, KV_HEADS, SIZE), "v": (WIDTH, KV_HEADS, SIZE),
              "o": (HEADS, SIZE, WIDTH), "gate": (WIDTH, FF), "up": (WIDTH, FF),
              "down": (FF, WIDTH)}
    ones = np.ones(WIDTH, np.float32)
    return {"embedding": normal(VOCAB, WIDTH), "norm": ones, "layers": [
        {name: normal(*shape) for name, shape in shapes.items()} | {"norm1": ones, "norm2": ones}
        for _ in range(LAYERS)]}


def prompts():
    """i32[PROMPTS, PROMPT] without pad or end."""
    return np.random.default_rng(1).integers(1, END, (PROMPTS, PROMPT), np.int32)


def completions():
    """i32[SAMPLES, NEW], and an advantage each."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, END, (SAMPLES, NEW), np.int32)
    return tokens, rng.standard_normal(SAMPLES).astype(np.float32)


def checked():
    """Fixed sequences i32[4, 48]; see mean_logprob."""
    return np.random.default_rng(3).integers(1, END, (4, 48), np.int32)


def mean_logprob(logits):
    """Of checked() after their first tokens, given logits [4, 48, VOCAB]."""
    rest = np.asarray(logits, np.float64)[:, :-1]
    rest = rest - rest.max(-1, keepdims=True)
    logp = rest - np.log(np.exp(rest).sum(-1, keepdims=True))
    return float(np.take_along_axis(logp, checked()[:, 1:, None], -1).mean())


def reward(text):
    """Cheap, and different between samples: how many words it has."""
    return float(len(set(text.split())))


class Words:
    """Text is numbers with spaces between."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(str(int(one)) for one in ids)

    def bos_id(self):
        return None

    def eos_id(self):
        return END

    def pad_id(self):
        return PAD


def texts():
    """The prompts in words."""
    return [Words().decode(one) for one in prompts()]


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    given = parser.parse_args()
    given.parts = given.parts.split(",")
    return given


def seconds(call, repeats):
    """Processor seconds of `repeats` calls after one that is not counted."""
    call()
    found = []
    for _ in range(repeats):
        begun = time.process_time()
        call()
        found.append(time.process_time() - begun)
    return found


def between(stamps):
    """Seconds from each stamp of the processor's clock to the next, without the first."""
    return np.diff(np.array(stamps))[1:].tolist()


def report(**result):
    """Print the line that the command reads."""
    for part in PARTS:
        if part in result:
            result[part] = [round(one, 4) for one in result[part]]
            result[f"{part}_median"] = statistics.median(result[part])
    print(json.dumps({"peer": ""} | result), flush=True)
