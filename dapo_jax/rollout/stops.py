"""Stop texts: where a completion's text first contains one, it ends.

The device knows only stop ids and generates on to the budget; this is done on the host after it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dapo_jax import types


def cut(samples: types.Samples, spelled: Sequence[bytes], texts: Sequence[str]) -> types.Samples:
    """End each completion with the token at which its text first contains one of `texts`.

    `spelled` holds the bytes of each id. That token is kept whole, so the text may go on a little
    after the stop; later tokens are dropped and the sample counts as stopped.
    """
    if not texts:
        return samples
    wanted = [text.encode("utf-8") for text in texts]
    length = np.array([_end(tokens[:count], spelled, wanted) for tokens, count
                       in zip(samples.tokens, samples.length)], samples.length.dtype)
    ended = length > 0
    length = np.where(ended, length, samples.length)
    kept = np.arange(samples.tokens.shape[1]) < length[:, None]
    return dataclasses.replace(
        samples, tokens=np.where(kept, samples.tokens, 0),
        logprobs=np.where(kept, samples.logprobs, np.float32(0)),
        loss_mask=samples.loss_mask & kept, length=length, stopped=samples.stopped | ended)


def _end(tokens: np.ndarray, spelled: Sequence[bytes], wanted: Sequence[bytes]) -> int:
    """Tokens up to the one that completes the first stop text; 0 if there is none.

    UTF-8 synchronises itself: bytes of one text are found in those of another only where its
    characters are, so that tokens of half a character do no harm.
    """
    pieces = [spelled[i] for i in tokens]
    whole = b"".join(pieces)
    found = [at + len(text) for text in wanted if (at := whole.find(text)) >= 0]
    if not found:
        return 0
    return int(np.searchsorted(np.cumsum([len(piece) for piece in pieces]), min(found))) + 1
