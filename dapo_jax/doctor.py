"""Look at this machine, and try in seconds what every run relies on.

    python -m dapo_jax.doctor
    python -m dapo_jax.doctor --dir=runs

Versions, devices, compilation cache, memory and disk; then a self-test on a tiny model: the loss
does not depend on how a batch is split, a saved state comes back to the bit, a scoring worker
answers. What fails is named, with what to do.

exit status: 0 all well, 1 something failed
"""

import argparse
import dataclasses
import importlib.metadata
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from packaging import requirements

from dapo_jax import command_line, self_test

FAILED = 1
GIB = 2 ** 30
LEAST = 1.0  # GiB of memory, and of disk, below which a run is likely to end for want of it
PYTHONS = ((3, 11), (3, 13))
SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
REQUIRED = pathlib.Path(__file__).resolve().parent.parent / "requirements.txt"


@dataclasses.dataclass(frozen=True)
class Check:
    """`find` says what is there, or raises with what is wrong; then `remedy` is what to do."""

    name: str
    find: Callable[[], str]
    remedy: str


def python() -> str:
    """The interpreter's version."""
    version = sys.version_info[:2]
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        raise self_test.Wrong(f"{version[0]}.{version[1]} is none of 3.11, 3.12, 3.13")
    return sys.version.split()[0]


def packages() -> str:
    """Versions, each held against requirements.txt where the project's folder is here."""
    lines = REQUIRED.read_text(encoding="utf-8").splitlines() if REQUIRED.is_file() else []
    wanted = [requirements.Requirement(text) for line in (*lines, *SHOWN)
              if (text := line.split("#")[0])]
    wrong, found = [], {}
    for one in wanted:
        try:
            found[one.name] = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{one.name} is missing")
            continue
        if not one.specifier.contains(found[one.name], prereleases=True):
            wrong.append(f"{one.name} is {found[one.name]}, wanted: {one.specifier}")
    if wrong:
        raise self_test.Wrong("; ".join(wrong))
    return ", ".join(f"{name} {found[name]}" for name in SHOWN)


def devices() -> str:
    """What jax computes on; wrong where an NVIDIA GPU stands idle without anybody's wish."""
    here, asked = jax.devices(), os.environ.get("JAX_PLATFORMS", "")
    text = f"{len(here)} x {here[0].device_kind} ({here[0].platform})"
    if here[0].platform == "cpu" and shutil.which("nvidia-smi") and not asked:
        raise self_test.Wrong(f"{text}, but nvidia-smi is installed: jax sees no GPU")
    return text + (f", as JAX_PLATFORMS={asked} asks for" if asked else "")


def cache() -> str:
    """Where compiled programs are kept."""
    path = cast(Any, jax.config).jax_compilation_cache_dir
    if not path:
        return "off: each start compiles anew; set JAX_COMPILATION_CACHE_DIR to a folder"
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    sizes = [file.stat().st_size for file in folder.iterdir() if file.is_file()]
    return f"{folder}: {len(sizes)} files, {sum(sizes) / GIB:.2f} GiB"


def memory() -> str:
    """Of the machine, and of an accelerator."""
    stats = jax.local_devices()[0].memory_stats() or {}
    device = f"; {stats['bytes_limit'] / GIB:.1f} GiB a device" if "bytes_limit" in stats else ""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return f"this system does not say what is free{device}"
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    free, whole = (kib[name] * 1024 / GIB for name in ("MemAvailable", "MemTotal"))
    if free < LEAST:
        raise self_test.Wrong(f"{free:.1f} of {whole:.1f} GiB are free")
    return f"{free:.1f} of {whole:.1f} GiB free{device}"


def disk(folder: pathlib.Path) -> str:
    """What is free where runs will be."""
    usage = shutil.disk_usage(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass
    if usage.free / GIB < LEAST:
        raise self_test.Wrong(f"{usage.free / GIB:.1f} GiB are free in {folder.resolve()}")
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder.resolve()}"


def checks(folder: pathlib.Path) -> list[Check]:
    """All of them, in the order in which one explains the next."""
    return [
        Check("python", python, "set PYTHON to one of these and remove .venv: launch/local.sh "
              "makes it anew"),
        Check("packages", packages, "pip install -r requirements.txt, in the environment of this "
              "command"),
        Check("devices", devices, "pip install 'jax[cuda12]' (or the jax of your accelerator), or "
              "set JAX_PLATFORMS=cpu to compute on the CPU"),
        Check("cache", cache, "set JAX_COMPILATION_CACHE_DIR to a folder that you may write to"),
        Check("memory", memory, "end other work, or take a machine with more"),
        Check("disk", lambda: disk(folder), "make room, or put runs elsewhere (--workdir; --dir "
              "here)"),
        Check("exact loss", self_test.exact_loss, "do not trust runs here: with gpu, try "
              "--platform=gpu-deterministic; else reinstall jax and jaxlib as requirements.txt "
              "names them"),
        Check("resume", self_test.resume, "see that TMPDIR can be written to; else reinstall "
              "orbax-checkpoint as requirements.txt names it"),
        Check("scoring", self_test.scoring, "see that this user may start processes, and that "
              "python -c 'import dapo_jax.envs.worker' works in this folder"),
    ]


def examine(chosen: Sequence[Check]) -> list[str]:
    """Print what each check finds; the names of those that failed."""
    failed = []
    for check in chosen:
        begun = time.perf_counter()
        try:
            print(f"{check.name:12}{check.find()}  ({time.perf_counter() - begun:.1f} s)",
                  flush=True)
        except Exception as error:  # whatever it is, the other checks go on and this one is named
            failed.append(check.name)
            kind = "" if isinstance(error, self_test.Wrong) else f"{type(error).__name__}: "
            print(f"{check.name:12}FAILED: {kind}{error}\n{'':12}what to do: {check.remedy}",
                  flush=True)
    return failed


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.doctor", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=pathlib.Path, default=pathlib.Path(),
                        help="a folder on the disk of your runs; default: this one")
    failed = examine(checks(parser.parse_args(arguments).dir))
    print(f"failed: {', '.join(failed)}" if failed else "all well")
    return FAILED if failed else command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
