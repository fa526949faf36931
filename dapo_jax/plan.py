"""Plan a run for accelerators that are not here: what fits, what is sent, what a step takes.

    python -m dapo_jax.plan --config=configs/dapo_qwen2_5_32b.py --mesh=data:16,fsdp:16 --chip=v5p
    python -m dapo_jax.plan --config=configs/dapo_qwen2_5_32b.py --mesh=fsdp:16,tensor:8 --chip=h100
    python -m dapo_jax.plan --config=configs/quickstart.py --mesh=data:4 --chip=v5e --json=plan.json

TPU (v4, v5e, v5p, v6e): the run's own programs are compiled for the slice by the real TPU compiler
(the package libtpu; no TPU is needed), for --minutes=4 at most. GPU (a100, h100, h200), and TPU
with --count=1: from shapes.
The largest microbatch and number of slots are searched: from shapes, then by compiling.
No parameter is made; where a model's files are not here, config.model.preset gives its shape.
"""

import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dapo_jax import command_line, config
from dapo_jax.planning import chips, page, spending, whole


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    # The programs are of shapes alone: whatever accelerator is here is none of their business.
    jax.config.update("jax_platforms", "cpu")
    cfg, flags = command_line.parse(
        arguments, program="python -m dapo_jax.plan", purpose=__doc__, extra={
            "mesh": command_line.Flag("", "AXIS:SIZE with commas between them, of data, fsdp, "
                                      "tensor; empty: config.mesh"),
            "chip": command_line.Flag("v5p", " | ".join(chips.CHIPS)),
            "length": command_line.Flag(0, "mean tokens of a completion in the estimate of time; "
                                        "0: rollout.max_new_tokens"),
            "minutes": command_line.Flag(whole.MINUTES, "no program is compiled that would end "
                                         "later; what is left out then, the page says"),
            "compiles": command_line.Flag(whole.COMPILES, "further programs compiled at most to "
                                          "find the largest microbatch, and as many for the "
                                          "slots"),
            "count": command_line.Flag(0, "1: count from shapes, compile nothing"),
            "json": command_line.Flag("", "file for the figures")})
    chip = chips.find(flags["chip"])
    shape = chips.mesh_shape(flags["mesh"]) if flags["mesh"] else cfg.mesh
    _check(cfg, flags, arguments)
    target = pathlib.Path(flags["json"]) if flags["json"] else None
    if target:
        if target.is_dir():
            raise config.ConfigError(f"--json={target} is a folder; name a file")
        command_line.check_folder(target.parent, flag="json")
    figures = whole.planned(cfg, chip, shape, length=flags["length"], compiles=flags["compiles"],
                            minutes=flags["minutes"], say=_say,
                            by_compiler=bool(chip.slices) and not flags["count"])
    print(page.text(figures))
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if spending.runs_on():
        sys.stdout.flush()
        os._exit(command_line.DONE)
    return command_line.DONE


def _check(cfg: config.Config, flags: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """ConfigError for a flag out of its range."""
    if not 0 <= flags["length"] <= cfg.rollout.max_new_tokens:
        raise config.ConfigError(f"--length={flags['length']}: from 1 to rollout.max_new_tokens = "
                                 f"{cfg.rollout.max_new_tokens}, or 0")
    if flags["compiles"] < 0:
        raise config.ConfigError(f"--compiles={flags['compiles']}: at least 0")
    if flags["minutes"] < 0:
        raise config.ConfigError(f"--minutes={flags['minutes']}: at least 0")
    if flags["count"] not in (0, 1):
        raise config.ConfigError(f"--count={flags['count']}: 0 or 1")
    if {"--json=", "-json="} & set(arguments):
        raise config.ConfigError("--json is empty: name a file, or leave it out")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    command_line.leave(main)
