"""Programs of a device without a model, in numpy: all that is known of a context is a hash of its
tokens, and what is drawn after it depends on that. A context that is lost, mixed up, or short of a
token therefore shows in every token after it. `told` plays a sample in a plain loop.

A clock of its own says how long the device worked.
"""

import dataclasses
import time

import numpy as np

from dapo_jax import types
from dapo_jax.rollout import draw, engine, programs

VOCAB, STOP = 1000, 7
START = np.uint32(2166136261)


def mixed(state, token):
    """The hash after a token; uint32 arrays."""
    x = np.asarray(state).astype(np.uint64) ^ np.asarray(token).astype(np.uint64)
    x = x * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)
    x = (x ^ x >> np.uint64(15)) * np.uint64(0x85EBCA77) & np.uint64(0xFFFFFFFF)
    return (x ^ x >> np.uint64(13)).astype(np.uint32)


def drawn(state, sample, turn):
    """The token after a context; one in 16 is a stop."""
    number = mixed(mixed(state, sample), turn)
    return np.where(number % 16 == 0, STOP, number % VOCAB).astype(np.int32)


def hashed(tokens, state=START):
    for token in tokens:
        state = mixed(state, token)
    return state


@dataclasses.dataclass
class Clock:
    """Seconds that the device worked, and all that passed: those, the ones in which it waits, and
    the host's real ones, of the processor, between two programs."""

    step: float = 0.0  # of one iteration of a slot
    token: float = 0.0  # that is appended or prefilled
    now: float = 0.0
    busy: float = 0.0
    host: float = 0.0
    left: float = dataclasses.field(default_factory=time.process_time)  # the end of the last one

    def begin(self):
        """The host has come to the next program."""
        spent = time.process_time() - self.left
        self.host, self.now = self.host + spent, self.now + spent

    def work(self, seconds):
        self.now, self.busy = self.now + seconds, self.busy + seconds
        self.left = time.process_time()


@dataclasses.dataclass
class Slots:
    """As types.Slots of one row each."""

    size: int
    ring: int
    clock: int = 0

    def __post_init__(self):
        for name in ("prompt", "visit", "budget", "next", "left", "token", "sample", "position",
                     "turn", "length"):
            setattr(self, name, np.zeros(self.size, np.int32))
        self.live = np.zeros(self.size, bool)
        self.prompt_state = np.zeros(self.size, np.uint32)
        self.state = np.zeros(self.size, np.uint32)
        self.written = np.zeros((self.size, self.ring), np.uint32)  # the state with each column


def arrays(tree):
    return [np.asarray(x) for x in tree]


def places(local, parts, wide):
    """(rows that are somewhere, where) of numbers within parts."""
    each = len(local) // parts
    part = np.repeat(np.arange(parts), each)
    rows = np.flatnonzero(local < wide)
    return rows, part[rows] * wide + local[rows]


def admit(slots, prompts, hidden, lengths, *, parts):
    rows, at = places(np.asarray(prompts.slot), parts, slots.size // parts)
    for name in ("prompt", "visit", "budget"):
        getattr(slots, name)[at] = np.asarray(getattr(prompts, name))[rows]
    sample, count = np.asarray(prompts.sample)[rows], np.asarray(prompts.count)[rows]
    slots.sample[at], slots.next[at], slots.left[at] = sample, sample + 1, count - 1
    slots.position[at], slots.turn[at], slots.live[at] = 0, 0, True
    slots.prompt_state[at], slots.length[at] = hidden[rows], lengths[rows]
    return slots


def decode_chunk(slots, enough, *, chunk, clock):
    clock.begin()
    columns = {name: np.zeros((chunk, slots.size, 1), kind) for name, kind in (
        ("token", np.int32), ("logprob", np.float32), ("position", np.int32))}
    columns["sample"] = np.full((chunk, slots.size, 1), -1, np.int32)
    steps = 0
    while steps < chunk and (~slots.live).sum() < min(int(enough), slots.size):
        first = slots.position == 0
        slots.state = np.where(first, slots.prompt_state, mixed(slots.state, slots.token))
        slots.written[:, slots.clock] = slots.state
        token = drawn(slots.state, slots.sample, slots.turn)
        columns["token"][steps, :, 0], columns["position"][steps, :, 0] = token, slots.position
        columns["logprob"][steps, :, 0] = -1 / (1 + token)
        columns["sample"][steps, slots.live, 0] = slots.sample[slots.live]
        ended = slots.live & ((token == STOP) | (slots.position + 1 >= slots.budget))
        begins = ended & (slots.left > 0)
        slots.sample = np.where(begins, slots.next, slots.sample)
        slots.next, slots.left = slots.next + begins, slots.left - begins
        slots.position = np.where(ended, 0, slots.position + 1)
        slots.live &= begins | ~ended
        slots.token, slots.clock, steps = token, (slots.clock + 1) % slots.ring, steps + 1
    clock.work(steps * slots.size * clock.step)
    return slots, types.Chunk(**columns, steps=np.int32(steps), free=~slots.live)


def resize(slots, source, *, parts):
    source = np.asarray(source)
    new = Slots(len(source), slots.ring, slots.clock)
    part = np.repeat(np.arange(parts), len(source) // parts)
    was = part * (slots.size // parts) + np.maximum(source, 0)
    for name, value in vars(slots).items():
        if isinstance(value, np.ndarray):
            setattr(new, name, value[was])
    new.live &= source >= 0
    return new


def lines(slots, slot, column, count, *, parts):
    slot, column, count = arrays((slot, column, count))
    wide = slots.size // parts
    at = np.repeat(np.arange(parts), len(slot) // parts) * wide + slot
    state = np.where(count > 0, slots.written[at, column], slots.prompt_state[at])
    return contexts(state, slots.length[at] + count)


def contexts(state, count):
    """types.Parked with a hash and the number of tokens in it."""
    return types.Parked(np.asarray(state, np.uint32)[None, :, None],
                        np.asarray(count, np.int32)[None, :, None])


def store(pool, entry, new, *, parts):
    rows, at = places(np.asarray(entry), parts, pool.keys.shape[1] // parts)
    pool.keys[:, at] = np.asarray(new.keys)[:, rows]
    pool.values[:, at] = np.asarray(new.values)[:, rows]
    return pool


def extend(pool, entry, tokens, start, count, *, parts, clock):
    clock.begin()
    entry, tokens, start, count = arrays((entry, tokens, start, count))
    rows, at = places(entry, parts, pool.keys.shape[1] // parts)
    for row, place in zip(rows, at):
        # A context that begins anew may overwrite what stands there.
        assert start[row] in (0, pool.values[0, place, 0])
        state = START if start[row] == 0 else pool.keys[0, place, 0]
        pool.keys[0, place, 0] = hashed(tokens[row, :count[row]], state)
        pool.values[0, place, 0] = start[row] + count[row]
    clock.work(tokens.size * clock.token)
    return pool


def seat(slots, pool, resumed, *, parts):
    rows, at = places(np.asarray(resumed.slot), parts, slots.size // parts)
    part = at // (slots.size // parts)
    entry = part * (pool.keys.shape[1] // parts) + np.asarray(resumed.entry)[rows]
    assert not slots.live[at].any()
    for name in ("prompt", "visit", "budget", "turn", "token", "sample", "position", "length"):
        getattr(slots, name)[at] = np.asarray(getattr(resumed, name))[rows]
    slots.left[at], slots.live[at] = 0, True
    slots.state[at] = pool.keys[0, entry, 0]
    assert (pool.values[0, entry, 0] == slots.length[at] + slots.position[at] - 1).all()
    return slots


def made(*, slots, new, room, chunk, buckets=(8,), parts=1, share=8, clock=None):
    """An engine.Engine of these programs."""
    clock, admitted = clock or Clock(), programs.refill(slots[-1], parts)
    room = dataclasses.replace(room, device=-(-room.device // parts) * parts)

    def prefill(_, tokens, length):
        clock.begin()
        tokens, length = arrays((tokens, length))
        states = [hashed(row[:size]) for row, size in zip(tokens, length)]
        clock.work(tokens.size * clock.token)
        return np.array(states, np.uint32), length

    parking = programs.Parking(
        empty=lambda: contexts(*np.zeros((2, room.device + admitted), np.int32)),
        lines=dict.fromkeys(slots, lambda *of: lines(*of, parts=parts)),
        store=lambda *of: store(*of, parts=parts),
        extend={width: lambda _, *of: extend(*of, parts=parts, clock=clock)
                for width in room.replies},
        seat=dict.fromkeys(slots, lambda *of: seat(*of, parts=parts)),
        room=room, ring=new + chunk, place=None)
    compiled = programs.Programs(
        weights=lambda params: params,
        empty={size: lambda size=size: Slots(size, new + chunk) for size in slots},
        prefill=dict.fromkeys(buckets, prefill),
        admit={(size, width): lambda *of: admit(*of, parts=parts)
               for size in slots for width in buckets},
        decode=dict.fromkeys(slots, lambda _, state, root, enough: decode_chunk(
            state, enough, chunk=chunk, clock=clock)),
        resize={(one, other): lambda *of: resize(*of, parts=parts)
                for one in slots for other in slots},
        admitted=admitted, split=None, whole=None, parking=parking)
    sampling = draw.Sampling(max_new_tokens=new, stop_ids=(STOP,))
    return engine.Engine(sampling, 1, share, tuple(slots), tuple(buckets), 0, parts, compiled)


def told(prompt, sample, first_budget, reply):
    """(tokens, turn of each or -1, stopped) of a sample, in a plain loop; `reply(turn, tokens of
    it, tokens so far)` gives (tokens, limit of the sample then) or None."""
    tokens, turns, limit, turn = [], [], first_budget, 0
    while True:
        begun = len(tokens)
        while True:
            token = int(drawn(hashed([*prompt, *tokens]), sample, turn))
            tokens.append(token)
            turns.append(turn)
            if token == STOP or len(tokens) >= limit:
                break
        more = reply(turn, tokens[begun:], len(tokens))
        if more is None:
            return tokens, turns, tokens[-1] == STOP
        tokens += more[0].tolist()
        turns += [-1] * len(more[0])
        limit, turn = more[1], turn + 1
