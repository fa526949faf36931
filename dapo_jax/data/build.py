"""Build a TFDS data set, of ArrayRecord files, from published files that lie on disk.

    python -m dapo_jax.data.build --name=gsm8k --train=train.jsonl --test=test.jsonl --out=DIR

Then config.task.train_path = DIR/gsm8k/1.0.0. Nothing is downloaded, and TensorFlow is not needed.
"""

import contextlib
import logging
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from dapo_jax import command_line, config
from dapo_jax.data import formats, identity, scan, sources

LOG = logging.getLogger(__name__)
PROGRAM = "python -m dapo_jax.data.build"
FLAGS = {
    "name": ("", "gsm8k, math, math500, aime, dapo, or any other name for a file of --prompt_field "
                 "and --answer_field"),
    "train": ("", "file of the split train: .jsonl or .parquet"),
    "test": ("", "file of the split test; at least one of the two is needed"),
    "out": ("", "folder; the data set becomes OUT/NAME/1.0.0"),
    "prompt_field": ("prompt", "another name: field of the prompt, a text or chat messages"),
    "answer_field": ("answer", "another name: field of the answer"),
    "answer_rule": ("whole", "another name: whole, hashes (what follows ####), boxed"),
    "bad_records": ("error", "error, or skip: count them and leave them out"),
}


def build(name: str, paths: Mapping[str, str], out: str, *, task: config.Task) -> pathlib.Path:
    """Build the splits of a data set; returns the folder that was made.

    `paths`: split -> file. Repeats, by prompt and answer, are left out and counted in the log.
    ConfigError names bad rows by file and line.
    """
    # Here and not above: it takes long to import, and --help needs none of it.
    from dapo_jax.data import builders

    folder = pathlib.Path(out) / name / str(builders.Problems.VERSION)
    if folder.exists():
        raise config.ConfigError(f"{folder} exists: name another --out, or remove it")
    splits = {split: _records(path, task) for split, path in paths.items()}
    builder = builders.Problems(name=name, splits=splits, data_dir=out)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            builder.download_and_prepare()
    except OSError as error:
        raise config.ConfigError(f"--out={out} cannot be written: {error.strerror}") from error
    return folder


def _records(path: str, task: config.Task) -> Iterator[formats.Record]:
    cfg = config.Config(task=config.Task(
        **{**vars(task), "train_path": path, "eval_path": path, "train_size": 0}))
    selected, counts = sources.select(cfg, "train")
    LOG.info("%s: %d records; left out: %s", path, len(selected), ", ".join(
        f"{count} {reason}" for reason, count in counts.items() if count) or "none")
    return ({key: value for key, value in record.items() if key not in ("dataset", identity.KEY)}
            for job in selected.jobs for _, record in scan.chosen(*job))


def main(arguments: Sequence[str]) -> int:
    """Parse flags and build."""
    given = _flags(arguments)
    name, out = given["name"], given["out"]
    paths = {split: given[split] for split in ("train", "test") if given[split]}
    for flag, value in (("name", name), ("out", out), ("train", "".join(paths.values()))):
        if not value:
            raise config.ConfigError(f"--{flag} is missing; see {PROGRAM} --help")
    if not name.isidentifier():
        raise config.ConfigError(f"--name={name}: letters, digits and _ only")
    known = name in formats.FORMATS
    fields = {field: given[field] for field in ("prompt_field", "answer_field", "answer_rule")}
    # Which answers are good in other data is for the reward to say that it will be scored by.
    task = config.Task(name="math", format=name if known else "fields",
                       reward="" if known else "unknown:yet",
                       bad_records=given["bad_records"], **fields)
    folder = build(name, paths, out, task=task)
    print(os.fspath(folder))
    return command_line.DONE


def _flags(arguments: Sequence[str]) -> dict[str, Any]:
    if {"--help", "-h", "-help"} & set(arguments):
        lines = [__doc__.strip(), "", *(f"  --{name}={default}\n      {about}"
                                        for name, (default, about) in FLAGS.items())]
        lines += ["", "layouts:", *(f"  {name}: {form.about}"
                                    for name, form in formats.FORMATS.items())]
        print("\n".join(lines))
        raise SystemExit(command_line.DONE)
    values = flags.FlagValues()
    for name, (default, about) in FLAGS.items():
        choices = {"answer_rule": list(formats.RULES), "bad_records": ["error", "skip"]}.get(name)
        if choices:
            flags.DEFINE_enum(name, default, choices, about, flag_values=values)
        else:
            flags.DEFINE_string(name, default, about, flag_values=values)
    try:
        rest = values([PROGRAM, *arguments])[1:]
    except flags.Error as error:
        raise config.ConfigError(str(error)) from error
    if rest:
        raise config.ConfigError(f"unexpected argument {rest[0]!r}; see {PROGRAM} --help")
    return {name: values[name].value for name in FLAGS}


if __name__ == "__main__":
    command_line.leave(main)
