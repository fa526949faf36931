"""Replies of an environment as the tokens that stand between two turns of the model.

A reply is encoded once and appended to what the model sampled; nothing sampled is encoded again.
"""

from collections.abc import Callable

import numpy as np

from dapo_jax import config
from dapo_jax.text import chat as chats
from dapo_jax.text import tokenizer as tokenizers

# Tokens i32[*] after a turn from the reply's text and the turn's last token; ValueError: the text
# cannot be encoded, or holds what the tokenizer takes for a special token.
Encoder = Callable[[str, int], np.ndarray]

_TURN = "\ue000"  # stands for the model's turn where a template is tried; no text has it


def encoder(tokenizer: tokenizers.Tokenizer, chat: chats.Chat | None, *, role: str) -> Encoder:
    """How replies are encoded: as they are, or, with a `role`, as its message in the chat, up to
    where the assistant goes on. ConfigError: there is no template, or it leaves the message out.
    """
    if not role:
        return lambda text, last: _plain(tokenizer, text)
    if chat is None:
        raise config.ConfigError(
            f"config.environment.role = {role!r} writes replies with a chat template, but the "
            "tokenizer comes with none: name one in config.tokenizer.chat_template")
    if "probe" not in between(chat, "probe", role=role):
        raise config.ConfigError(f"the chat template does not write messages of the role {role!r}: "
                                 "set config.environment.role to another")

    def encoded(text: str, last: int) -> np.ndarray:
        _plain(tokenizer, text)  # before the template's own special tokens stand around it
        tokens = np.asarray(tokenizer.encode(between(chat, text, role=role), start=False), np.int32)
        # The template ends the turn with a token that the model has already written, if it did.
        written = len(tokens) and last in tokenizer.stop_ids and tokens[0] == last
        return tokens[1:] if written else tokens

    return encoded


def between(chat: chats.Chat, text: str, *, role: str) -> str:
    """What the template writes from the end of an assistant's turn to the start of the next, with
    a message between them; ConfigError as chat.render."""
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": _TURN},
                {"role": role, "content": text}]
    return chats.render(chat, messages).partition(_TURN)[2]


def _plain(tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
    """A tool's text is a stranger's: it must not end a turn or begin a message by a token."""
    tokens = tokenizer.encode(text, start=False)
    special = [token for token in tokens if not tokenizer.spelled[token]]
    if special:
        raise ValueError(f"the reply {text[:80]!r} spells the special token {special[0]}")
    return np.asarray(tokens, np.int32)
