"""What the sampler holds on the device; see types.py, under whose name all of it is used."""

import dataclasses

import jax

from dapo_jax.types_fields import Leaf

# Beside it stands the decorator of a dataclass, by which type checkers know one.
_pytree = jax.tree_util.register_dataclass



@_pytree
@dataclasses.dataclass(frozen=True)
class Prompts:
    """Input of one admission: prompts for free slots, A at once."""

    tokens: Leaf  # i32[A, P] right-padded
    length: Leaf  # i32[A]
    slot: Leaf  # i32[A] its place within a part of the slots; S or more: nowhere
    prompt: Leaf  # i32[A]
    visit: Leaf  # i32[A]
    sample: Leaf  # i32[A] number of the first sample to draw
    count: Leaf  # i32[A] samples to draw
    budget: Leaf  # i32[A] new tokens allowed to each sample, 1 to T


@_pytree
@dataclasses.dataclass(frozen=True)
class PromptCache:
    """Keys and values of each slot's prompt, shared by its rows."""

    keys: Leaf  # [N, S, K, E, P]; in slots a tuple of N, so that each is its own buffer
    values: Leaf  # [N, S, K, P, E]; in slots a tuple
    length: Leaf  # i32[S]


@_pytree
@dataclasses.dataclass(frozen=True)
class SampleCache:
    """Keys and values of each row's own tokens; a tuple entry a layer, so that each is its own
    buffer and a decode step writes one column of it in place."""

    keys: tuple[jax.Array, ...]  # [S, R, K, E, T] each
    values: tuple[jax.Array, ...]  # [S, R, K, T, E] each


@_pytree
@dataclasses.dataclass(frozen=True)
class Slots:
    """The sampler's state: S prompts, and R rows each through which a prompt's samples stream.

    All rows write at one column, `clock`, whatever their position: no row outlives T tokens, so
    what it wrote is the newest of the T columns. A sample is its prompt and the tokens so far; one
    that was cut off goes on, from its row of types.Samples, as a slot whose prompt is both, with a
    first position that is not 0 (draws go by position, log-probs so far are in that row). Where
    samples have several turns there are a chunk's columns more than T, so that what ended in a
    chunk is whole at its end.
    """

    cache: PromptCache
    hidden: jax.Array  # [S, D] of the prompt's last token, from which first tokens are drawn
    own: SampleCache
    clock: jax.Array  # i32[] the column that is written next
    prompt: jax.Array  # i32[S]
    visit: jax.Array  # i32[S]
    budget: jax.Array  # i32[S] new tokens allowed to each sample
    next: jax.Array  # i32[S] number of the sample that begins next
    left: jax.Array  # i32[S] samples that have not begun
    token: jax.Array  # i32[S, R] the newest
    sample: jax.Array  # i32[S, R] number of the sample
    position: jax.Array  # i32[S, R] of the token that is drawn next
    live: jax.Array  # bool[S, R] the row has a sample
    turn: jax.Array | None = None  # i32[S] of the slot's samples; None: all are of one turn


@_pytree
@dataclasses.dataclass(frozen=True)
class Parked:
    """Contexts of samples that wait for a reply, Z of them: the keys and values of a prompt and,
    from the place after it, of the sample's own tokens, L = P + T at most."""

    keys: jax.Array  # [N, Z, K, E, L]
    values: jax.Array  # [N, Z, K, L, E]


@_pytree
@dataclasses.dataclass(frozen=True)
class Resumed:
    """Input of one resumption: samples that go on in free slots, A at once. All are i32[A]."""

    entry: Leaf  # its place within a part of the parked contexts
    slot: Leaf  # its place within a part of the slots; S or more: nowhere
    length: Leaf  # of the prompt
    position: Leaf  # tokens of the sample so far, of which all but the last have keys
    token: Leaf  # the last
    prompt: Leaf
    visit: Leaf
    sample: Leaf
    turn: Leaf  # the one that begins
    budget: Leaf  # tokens allowed to the sample until its turn ends


@_pytree
@dataclasses.dataclass(frozen=True)
class Chunk:
    """What a decode call drew; columns from `steps` on were not run."""

    token: Leaf  # i32[C, S, R]
    logprob: Leaf  # f32[C, S, R]
    sample: Leaf  # i32[C, S, R] whose token it is; -1: a row without one
    position: Leaf  # i32[C, S, R] of the token in its sample
    steps: Leaf  # i32[]
    free: Leaf  # bool[S] slots without a live row, at the end
