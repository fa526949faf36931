"""The tokenizer that the configuration names."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.text import folder, gguf_vocabulary, pieces, plain
from dapo_jax.text import tokenizer as tokenizers


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What `tokenizer` takes, so that another process can make the same one."""

    cfg: config.Tokenizer
    metadata: Mapping[str, Any] | None  # of the model's GGUF file
    model_folder: str


_LIBRARIES = ("tokenizers", "sentencepiece", "jinja2")
_SUFFIXES = {".json", ".model", ".txt", ".jinja"}  # of the files beside weights


def fingerprint(recipe: Recipe) -> str:
    """A digest of all that the tokenizer is made from: same digest, same ids."""
    digest = hashlib.blake2b()
    vocabulary = {key: value for key, value in (recipe.metadata or {}).items()
                  if key.startswith("tokenizer.")}
    versions = [importlib.metadata.version(library) for library in _LIBRARIES]
    digest.update(json.dumps([dataclasses.asdict(recipe.cfg), vocabulary, versions]).encode())
    for path in _files(recipe):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files(recipe: Recipe) -> list[pathlib.Path]:
    if recipe.cfg.kind not in ("folder", "sentencepiece"):
        return []
    named = pathlib.Path(recipe.cfg.path or recipe.model_folder)
    return sorted(path for path in named.iterdir() if path.suffix in _SUFFIXES
                  ) if named.is_dir() else [named]


def made(recipe: Recipe) -> tokenizers.Tokenizer:
    """The tokenizer of a recipe."""
    return tokenizer(recipe.cfg, metadata=recipe.metadata, model_folder=recipe.model_folder)


def tokenizer(cfg: config.Tokenizer, *, metadata: Mapping[str, Any] | None = None,
              model_folder: str = "") -> tokenizers.Tokenizer:
    """The configured tokenizer, with the configuration's chat template if it names one.

    `metadata` is that of the model's GGUF file, `model_folder` the model's Hugging Face folder,
    where there is one. ConfigError: the configuration asks for what is not there.
    """
    made = _make(cfg, metadata, model_folder)
    template = _template(cfg.chat_template)
    return dataclasses.replace(made, chat_template=template) if template else made


def _make(cfg: config.Tokenizer, metadata: Mapping[str, Any] | None,
          model_folder: str) -> tokenizers.Tokenizer:
    if cfg.kind == "characters":
        return plain.characters(cfg.alphabet)
    if cfg.kind == "bytes":
        return plain.byte_level()
    if cfg.kind == "sentencepiece":
        return pieces.from_model(pieces.read(cfg.path), where=cfg.path)
    if cfg.kind == "folder":
        return folder.from_folder(_existing(cfg.path or model_folder))
    if metadata is None:
        raise config.ConfigError("config.tokenizer.kind = gguf takes the vocabulary of the model's "
                                 "file, but config.model.source is not gguf")
    return gguf_vocabulary.from_gguf(metadata)


def _existing(path: str) -> str:
    if not os.path.isdir(path):
        raise config.ConfigError(f"config.tokenizer.kind = folder, but {path!r} is no folder: name "
                                 "one in config.tokenizer.path, or take a model from one")
    return path


def _template(named: str) -> str:
    """The text of a template that is given itself or as the path of a .jinja file."""
    if not named.endswith(".jinja"):
        return named
    try:
        with open(named, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise config.ConfigError(
            f"config.tokenizer.chat_template: cannot read {named!r}: {error.strerror}") from error
