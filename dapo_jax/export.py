"""Write a checkpoint as a Hugging Face folder.

    python -m dapo_jax.export --config=configs/quickstart.py --workdir=runs/quickstart --out=FOLDER
    python -m dapo_jax.export --config=configs/quickstart.py --workdir=DIR --out=FOLDER
                              [--checkpoint=STEP] [--dtype=bfloat16] [--adapter=1]

FOLDER holds safetensors, config.json, generation_config.json and the tokenizer's files;
`transformers` loads it. What it was made from is found by the configuration.

A trained adapter is merged into the weights; with --adapter=1 it alone is written, as a folder that
`peft` loads onto the base model.
"""

import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dapo_jax import command_line, config, evaluate, setup, setup_adapter, types
from dapo_jax.models import families, gguf, hf, hf_config, hf_out
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.text import gguf_vocabulary

# Of a source folder; what is not there is not copied.
_COPIED = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
           "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
           "chat_template.json", "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md")


def write(
    out: pathlib.Path, params: types.Tree, parts: setup.Model, *, dtype: str,
    largest: int = hf_out.LARGEST,
) -> None:
    """Write a new folder `out`.

    The folder appears under its name when it is whole. ConfigError: there is one already.
    """
    partial = _begin(out)
    hf_out.weights(partial, parts.spec, lambda tensor: _fetch(params, tensor), dtype=dtype,
                   largest=largest)
    source = parts.weights if isinstance(parts.weights, hf.Folder) else None
    hf_out.json_file(partial / "config.json", _model_config(parts, source, dtype))
    hf_out.json_file(partial / "generation_config.json", _generation_config(parts, source))
    _tokenizer(partial, parts, source)
    partial.rename(out)


def write_adapter(
    out: pathlib.Path, adapter: types.Tree, parts: setup.Model, *, dtype: str
) -> None:
    """Write a new folder `out` as PEFT has them; the base model's path is its name. See `write`."""
    partial = _begin(out)
    hf_out.adapter(partial, parts.spec, mesh_lib.fetch(adapter), parts.cfg.lora,
                   base=parts.cfg.model.path, dtype=dtype)
    partial.rename(out)


def _begin(out: pathlib.Path) -> pathlib.Path:
    """An empty folder beside `out`, to be renamed when it is whole."""
    _check_new(out)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _check_new(out: pathlib.Path) -> None:
    if out.exists():
        raise config.ConfigError(f"--out={out} exists; name a new folder")


def _fetch(params: types.Tree, tensor: families.Tensor) -> np.ndarray:
    leaf = params
    for key in tensor.path:
        leaf = leaf[key]
    return mesh_lib.fetch(leaf if tensor.layer is None else leaf[tensor.layer])


def _model_config(
    parts: setup.Model, source: hf.Folder | None, dtype: str
) -> Mapping[str, Any]:
    """The source's own, which says more than the spec, or one made from the spec."""
    if source is None:
        return hf_config.write(parts.spec, dtype=dtype, stop_ids=parts.tokenizer.stop_ids,
                               bos_id=parts.tokenizer.bos_id)
    key = "dtype" if "dtype" in source.values else "torch_dtype"
    return {**source.values, key: dtype}


def _generation_config(parts: setup.Model, source: hf.Folder | None) -> Mapping[str, Any]:
    """The source's own, if any, ending where the run's completions end."""
    path = source and source.path / "generation_config.json"
    values = hf.json_file(path) if path and path.is_file() else {}
    values |= {"eos_token_id": list(parts.stop_ids)}
    return values if parts.tokenizer.bos_id is None else {
        "bos_token_id": parts.tokenizer.bos_id, **values}


# -------------------------------------------------------------------------------- tokenizer files


def _tokenizer(folder: pathlib.Path, parts: setup.Model, source: hf.Folder | None) -> None:
    cfg = parts.cfg.tokenizer
    if cfg.kind in ("characters", "bytes"):
        _save_plain(folder, *(_characters(cfg.alphabet) if cfg.kind == "characters" else _bytes()))
    elif cfg.kind == "gguf":
        for name, content in gguf_vocabulary.files(cast(gguf.File, parts.weights).metadata).items():
            (folder / name).write_bytes(content)
    elif cfg.kind == "sentencepiece":
        shutil.copyfile(cfg.path, folder / "tokenizer.model")
        hf_out.json_file(folder / "tokenizer_config.json", {
            "tokenizer_class": "LlamaTokenizer", "legacy": True,
            "add_bos_token": parts.tokenizer.adds_bos, **parts.tokenizer.specials})
    else:
        origin = pathlib.Path(cfg.path) if cfg.path else cast(hf.Folder, source).path
        for name in _COPIED:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, folder / name)
    if cfg.chat_template:
        # transformers and vLLM prefer this file to what tokenizer_config.json says.
        (folder / "chat_template.jinja").write_text(
            cast(str, parts.tokenizer.chat_template), "utf-8")


def _save_plain(folder: pathlib.Path, engine: tokenizers.Tokenizer, end: str) -> None:
    engine.add_special_tokens([end])
    engine.save(str(folder / "tokenizer.json"))
    hf_out.json_file(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end,
        "clean_up_tokenization_spaces": False})


def _characters(alphabet: str) -> tuple[tokenizers.Tokenizer, str]:
    end = "<end>"
    engine = tokenizers.Tokenizer(models.WordLevel(
        {end: 0} | {character: i + 1 for i, character in enumerate(alphabet)}, unk_token=end))
    engine.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    engine.decoder = decoders.Fuse()
    return engine, end


def _bytes() -> tuple[tokenizers.Tokenizer, str]:
    end, letters = "<end>", [""] * 256
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for letter in level.alphabet():
        letters[_byte(letter)] = letter
    engine = tokenizers.Tokenizer(models.BPE(
        vocab={letter: i for i, letter in enumerate([*letters, end])}, merges=[]))
    engine.pre_tokenizer, engine.decoder = level, decoders.ByteLevel()
    return engine, end


def _byte(letter: str) -> int:
    """The byte that a letter of the byte-level alphabet stands for: printable ones stand for
    themselves, the others, in order, for the letters from 256 on."""
    if ord(letter) < 256:
        return ord(letter)
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [byte for byte in range(256) if byte not in printable][ord(letter) - 256]


# ----------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    cfg, flags = command_line.parse(
        arguments, program="python -m dapo_jax.export", purpose=__doc__, extra={
            "workdir": command_line.Flag(None, "directory of the run"),
            "out": command_line.Flag(None, "the folder to write; must not exist"),
            "checkpoint": command_line.Flag(-1, "step; -1: the newest"),
            "dtype": command_line.Flag("auto", "type of the weights: float32, bfloat16, float16; "
                                       "auto: as the source folder's, else as the run's"),
            "adapter": command_line.Flag(0, "1: the adapter alone, for peft; its auto is float32")})
    if flags["adapter"] and not cfg.lora.rank:
        raise config.ConfigError(f"--adapter={flags['adapter']}: config.lora.rank is 0, so the run "
                                 "trained no adapter; leave it out")
    if flags["dtype"] not in ("auto", *hf_out.DTYPES):
        raise config.ConfigError(f"--dtype={flags['dtype']}; allowed: auto, "
                                 f"{', '.join(hf_out.DTYPES)}")
    out = pathlib.Path(flags["out"])
    _check_new(out)
    command_line.check_folder(out.parent, flag="out")
    parts = setup.open_model(cfg)
    base = setup.open_base(parts)
    step, trained = evaluate.trained_of(parts, base, flags["workdir"], wanted=flags["checkpoint"])
    dtype = _dtype(parts, flags["adapter"]) if flags["dtype"] == "auto" else flags["dtype"]
    if flags["adapter"]:
        write_adapter(out, trained, parts, dtype=dtype)
    else:
        write(out, setup_adapter.sampled(base, trained), parts, dtype=dtype)
    print(f"{out}: step {step}, {dtype}")
    return command_line.DONE


def _dtype(parts: setup.Model, adapter: int = 0) -> str:
    if adapter:
        return "float32"
    values = parts.weights.values if isinstance(parts.weights, hf.Folder) else {}
    given = values.get("dtype", values.get("torch_dtype"))
    return given if given in hf_out.DTYPES else parts.spec.param_dtype


if __name__ == "__main__":
    command_line.leave(main)
