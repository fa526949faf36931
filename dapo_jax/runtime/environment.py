"""What a run was made on: versions, hardware, the code's commit. To be read, never to steer."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
GIB = 2 ** 30
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GIT_SECONDS = 5.0


def described() -> dict[str, str]:
    """Label to text, as DIR/config.json keeps it; what cannot be known is left out."""
    device = jax.devices()[0]
    found = {"python": sys.version.split()[0]}
    found |= {name: importlib.metadata.version(name) for name in PACKAGES}
    found |= {"device": f"{len(jax.devices())} x {device.device_kind}",
              "cores": str(os.cpu_count()), "processor": processor(), "memory": _memory(),
              "system": platform.platform(terse=True), "processes": str(jax.process_count()),
              "commit": commit(ROOT)}
    return {name: text for name, text in found.items() if text}


def processor() -> str:
    """The processor's name; empty where the system does not say."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else ""


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # not of this system
        return ""
    return f"{size / GIB:.1f} GiB"


def commit(folder: pathlib.Path) -> str:
    """The commit of a checkout, with `-dirty` behind it where files differ; empty without one."""
    if not (folder / ".git").exists():
        return ""  # an installed package, perhaps within somebody else's repository
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
