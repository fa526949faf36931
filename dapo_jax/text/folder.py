"""The tokenizer of a Hugging Face folder: tokenizer.json or tokenizer.model, and what surrounds it.

Only files of data are read; nothing of a folder is ever imported or run.
"""

import json
import os
from collections.abc import Mapping
from typing import Any, cast

import tokenizers

from dapo_jax import config
from dapo_jax.text import fast, pieces, tokenizer


def from_folder(path: str) -> tokenizer.Tokenizer:
    """The tokenizer of tokenizer.json, or else of tokenizer.model.

    A completion ends at the tokenizer's end token and at those of generation_config.json and
    config.json. ConfigError names the file at fault.
    """
    settings = _json(path, "tokenizer_config.json")
    makers = {"tokenizer.json": _from_json, "tokenizer.model": _from_model}
    there = [name for name in makers if os.path.isfile(os.path.join(path, name))]
    if not there:
        raise config.ConfigError(f"{path} holds neither tokenizer.json nor tokenizer.model: name a "
                                 "folder that does in config.tokenizer.path")
    made = makers[there[0]](path, settings, _specials(path, settings))
    outside = [i for i in made.stop_ids if not 0 <= i < made.vocab_size]
    if outside:
        raise config.ConfigError(f"{path}: the end token {outside[0]} of generation_config.json or "
                                 f"config.json is none of the {made.vocab_size} tokens")
    return made


def _from_json(path: str, settings: Mapping[str, Any], names: dict[str, str]
               ) -> tokenizer.Tokenizer:
    file = os.path.join(path, "tokenizer.json")
    try:
        engine = tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the library raises nothing narrower
        raise config.ConfigError(f"{file} cannot be used: {error}") from error
    for text, (i, special) in sorted(_added(path, settings).items(), key=lambda item: item[1]):
        if engine.token_to_id(text) is None:
            engine.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False)])
        if engine.token_to_id(text) != i:
            raise config.ConfigError(f"{path}: {text!r} is token {i} in tokenizer_config.json, but "
                                     f"{engine.token_to_id(text)} in tokenizer.json")
    before = _put_before(engine)
    if before and "bos_token" not in names:
        names["bos_token"] = cast(str, engine.id_to_token(before[0]))
    bos_id = engine.token_to_id(names["bos_token"]) if "bos_token" in names else None
    # As in transformers, the file alone says this, whatever add_bos_token of the settings is.
    adds_bos = bool(before) and before[0] == bos_id
    return fast.from_engine(
        engine, where=file, bos_id=bos_id, adds_bos=adds_bos,
        stop_ids=_stop_ids(path, engine.token_to_id(names.get("eos_token", ""))),
        chat_template=_template(path, settings), specials=names)


def _put_before(engine: tokenizers.Tokenizer) -> list[int]:
    """What the engine puts before a text of its own accord."""
    bare = engine.encode("a", add_special_tokens=False).ids
    whole = engine.encode("a").ids
    at = next((at for at in range(len(whole)) if whole[at:at + len(bare)] == bare), 0)
    return whole[:at]


def _from_model(path: str, settings: Mapping[str, Any], names: dict[str, str]
                ) -> tokenizer.Tokenizer:
    file = os.path.join(path, "tokenizer.model")
    model, added = pieces.read(file), _added(path, settings)
    own = {piece.piece: i for i, piece in enumerate(model.pieces)}
    for text, (i, _) in added.items():
        if own.get(text, i) != i or (text not in own and i < len(own)):
            raise config.ConfigError(f"{path}: {text!r} is token {i} in tokenizer_config.json, but "
                                     f"not in {file}")
    beside = {text: entry for text, entry in added.items() if entry[0] >= len(own)}
    ids = own | {text: i for text, (i, _) in added.items()}
    names = {"bos_token": model.trainer_spec.bos_piece,
             "eos_token": model.trainer_spec.eos_piece} | names
    names = {name: text for name, text in names.items() if text in ids}
    bos_id = ids.get(names.get("bos_token", ""))
    return pieces.from_model(
        model, where=file, added=beside, space_after_specials=bool(settings.get("legacy", False)),
        bos_id=bos_id, adds_bos=bos_id is not None and settings.get("add_bos_token") is not False,
        stop_ids=_stop_ids(path, ids.get(names.get("eos_token", ""))),
        chat_template=_template(path, settings), specials=names)


# -------------------------------------------------------------------------------- the files beside


def _stop_ids(path: str, own: int | None) -> tuple[int, ...]:
    """The tokenizer's own end first, then all that the folder's model configurations name."""
    named = [own]
    for name in ("generation_config.json", "config.json"):
        found = _json(path, name).get("eos_token_id")
        named += found if isinstance(found, list) else [found]
    ids = tuple(dict.fromkeys(i for i in named if i is not None))
    if not ids or not all(isinstance(i, int) for i in ids):
        raise config.ConfigError(
            f"{path} names no usable end token ({list(ids)}): give eos_token in "
            "tokenizer_config.json, or eos_token_id in generation_config.json")
    return ids


def _specials(path: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens: "bos_token" and the like."""
    both = _json(path, "special_tokens_map.json") | dict(settings)
    found = {name: entry.get("content") if isinstance(entry, dict) else entry
             for name, entry in both.items() if name.endswith("_token")}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _added(path: str, settings: Mapping[str, Any]) -> dict[str, tuple[int, bool]]:
    """Tokens that the folder adds to its vocabulary: text -> (id, whether special)."""
    older = {text: (i, False) for text, i in _json(path, "added_tokens.json").items()}
    entries = settings.get("added_tokens_decoder", {}).items()
    return older | {entry["content"]: (int(i), bool(entry.get("special"))) for i, entry in entries}


def _template(path: str, settings: Mapping[str, Any]) -> str | None:
    """The chat template: its own file, or the default one of tokenizer_config.json."""
    file = os.path.join(path, "chat_template.jinja")
    if os.path.isfile(file):
        with open(file, encoding="utf-8") as opened:
            return opened.read()
    found = settings.get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def _json(path: str, name: str) -> dict[str, Any]:
    """A file's object; empty where there is no such file."""
    file = os.path.join(path, name)
    if not os.path.isfile(file):
        return {}
    try:
        with open(file, encoding="utf-8") as opened:
            found = json.load(opened)
    except (OSError, ValueError) as error:
        raise config.ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise config.ConfigError(f"{file} holds a {type(found).__name__}, not an object")
    return found
