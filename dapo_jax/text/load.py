"""The tokenizer that the configuration names."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.text import folder, gguf_vocabulary, pieces, plain
from dapo_jax.text import tokenizer as tokenizers


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
