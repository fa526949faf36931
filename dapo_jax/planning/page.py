"""The plan as tables on a terminal."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table

from dapo_jax.planning import sources

GIB = 2 ** 30
KINDS = {"parameters": "parameters", "base": "parameters under the adapter",
         "optimizer": "optimizer", "gradients": "summed gradients", "reference": "reference model",
         "merged": "blocks with the adapter in them",
         "moved": "parameters on the sampler's mesh", "weights": "the sampler's weights",
         "prompt_cache": "caches of prompts", "sample_cache": "caches of samples",
         "parked": "contexts of samples that wait"}
PROGRAMS = {"update": "activations: gradient of a microbatch", "apply": "optimizer step",
            "log-probs, old": "log-probs of the policy",
            "log-probs, reference": "log-probs of the reference",
            "states": "hidden states of completions", "merge": "adapter merged",
            "move": "parameters moved to the sampler's mesh",
            "weights": "weights made for the sampler", "prefill": "prompts run",
            "admit": "prompts put into slots", "decode": "a token of each row drawn",
            "resize": "slots moved to fewer or more",
            "lines": "contexts taken out of slots", "store": "contexts kept",
            "extend": "replies appended to contexts", "seat": "contexts put into slots"}
RESOURCES = {"compute": "compute", "memory": "HBM", "links": "links", "network": "network"}


def text(figures: Mapping[str, Any]) -> str:
    """All tables and sentences."""
    out = io.StringIO()
    console = rich.console.Console(file=out, width=100)
    console.print(_title(figures))
    for table in (_memory(figures), _collectives(figures), _time(figures), _meshes(figures)):
        console.print(table)
    for line in _sentences(figures):
        console.print(line)
    return out.getvalue()


def _title(figures: Mapping[str, Any]) -> str:
    mesh, chip = _mesh(figures["mesh"]), figures["chip"]
    if figures["sampler"] != figures["mesh"]:
        mesh += f" (while samples are drawn: {_mesh(figures['sampler'])})"
    network = f", {chip['network'] / 1e9:g} GB/s between nodes of {chip['node']}" if (
        chip["node"]) else ""
    return (f"{figures['slice']}, mesh {mesh}; the model's shape is from {figures['model']}. A "
            f"{chip['name']}: {chip['flops'] / 1e12:g} TFLOP/s in bfloat16, HBM "
            f"{chip['hbm'] / 1e9:g} GB/s, {chip['link_name']} {chip['link'] / 1e9:g} GB/s each way"
            f"{network} ({chip['source']})")


def _mesh(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


def _gib(number: float) -> str:
    return f"{number / GIB:.4g}"


def _table(title: str, *columns: str) -> rich.table.Table:
    table = rich.table.Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _memory(figures: Mapping[str, Any]) -> rich.table.Table:
    table = _table("GiB on each device", "kind", "update", "rollout", "from")
    held = figures["held"]
    sides = {"gradients": "update", **dict.fromkeys(
        ("merged", "moved", "weights", "prompt_cache", "sample_cache", "parked"), "rollout")}
    for kind, label in KINDS.items():
        if held[kind]:
            side = sides.get(kind)
            table.add_row(label, "" if side == "rollout" else _gib(held[kind]),
                          "" if side == "update" else _gib(held[kind]), "shapes")
    for name, one in figures["programs"].items():
        here = _gib(one["temporary"])
        sides_of = ("", here) if name in sources.ROLLOUT else (here, "")
        table.add_row(f"temporary: {PROGRAMS[name]}", *sides_of, one["source"])
    peaks = [figures[side]["peak"] for side in ("update", "rollout")]
    table.add_row("at the peak, one program at a time", *map(_gib, peaks),
                  f"of {_gib(figures['memory'])}, {_gib(figures['room'])} to be used")
    return table


def _collectives(figures: Mapping[str, Any]) -> rich.table.Table:
    table = _table("Collectives of one run on each device (bytes of the larger side)", "program",
                   "kind", "over", "times", "GiB", "from")
    for name, one in figures["programs"].items():
        for sent in one["sent"]:
            table.add_row(name, sent["kind"], " x ".join(sent["axes"]), f"{sent['count']:.4g}",
                          _gib(sent["bytes"]), one["sent_from"])
        if not one["sent"]:
            table.add_row(name, "none", "", "0", "0", one["sent_from"])
    return table


def _time(figures: Mapping[str, Any]) -> rich.table.Table:
    table = _table("Seconds of a step at best (no waiting, every peak reached)", "part", "runs",
                   *(f"{name}, each" for name in RESOURCES.values()), "all together", "bound")
    for side in ("rollout", "update"):
        both = figures["time"][side]
        for name, part in both["parts"].items():
            table.add_row(name, f"{part['runs']:g}",
                          *(f"{part['each'][key]:.3g}" for key in RESOURCES),
                          f"{part['seconds']:.4g}", RESOURCES[part["bound"]])
        table.add_row(f"{side}, all", *[""] * 5, f"{both['seconds']:.4g}",
                      RESOURCES[both["bound"]], end_section=True)
    return table


def _meshes(figures: Mapping[str, Any]) -> rich.table.Table:
    table = _table("Meshes that hold one slot a device in update and rollout, most room first "
                   "(counted from shapes)", "mesh", "update, GiB", "rollout, GiB")
    for one in figures["meshes"]:
        table.add_row(_mesh(one["mesh"]), _gib(one["update"]), _gib(one["rollout"]))
    if not figures["meshes"]:
        table.add_row("none of so many chips", "", "")
    return table


def _sentences(figures: Mapping[str, Any]) -> Sequence[str]:
    update, rollout, row = figures["update"], figures["rollout"], figures["longest row"]
    lines = list(figures["notes"])
    for what, one in (("update: slots of a microbatch", update), ("rollout: slots", rollout)):
        state = "fits" if one["peak"] <= figures["room"] else "DOES NOT FIT"
        lines.append(f"{what} on a device: configured {one['slots']:g}, which {state}; the most "
                     f"that fit, of the {one['usable slots']} that a step can use, are "
                     f"{one['largest slots']} of {one['rows']} rows ({_found(one)}).")
    fits = "fit" if row["fits"] else "do NOT fit"
    lines.append(f"Responses of {row['completion']} tokens after prompts of {row['prompt']} {fits} "
                 "without context parallelism (each device holds whole rows); with one slot of one "
                 f"row on a device, the rollout's peak is {_gib(rollout['peak of one row'])} GiB.")
    if figures["host"]:
        lines.append(f"All hosts together keep {figures['host']['contexts']} further contexts of "
                     f"samples that wait: {_gib(figures['host']['bytes'])} GiB.")
    unread = [name for name, one in figures["programs"].items()
              if "TPU" in one["source"] and "TPU" not in one["sent_from"]]
    if unread:
        lines.append(f"The compiler could not print {', '.join(unread)}: what they send is counted "
                     "from shapes.")
    return [*lines, *_about_time(figures)]


def _found(one: Mapping[str, Any]) -> str:
    """How the search ended; what was not tried is guessed, and called so."""
    guess = f"; guessed from shapes: {one['by shapes']}" if "not tried" in one["found by"] else ""
    return one["found by"] + guess


def _about_time(figures: Mapping[str, Any]) -> Sequence[str]:
    time = figures["time"]
    rollout, update = (time[side] for side in ("rollout", "update"))
    return [
        f"A step of {time['samples']} samples of {time['mean completion']} tokens, each prompt "
        f"sampled once, takes at least {rollout['seconds']:.0f} s to sample (bound: "
        f"{RESOURCES[rollout['bound']]}) and {update['seconds']:.0f} s to learn from (bound: "
        f"{RESOURCES[update['bound']]}). Rewards and prompts beyond the batch are not in it."
        + (f" Episodes are reckoned with all of their {time['turns']} turns." if (
            time["turns"] > 1) else ""),
        "Operations and bytes moved are those of the products in what the compiler is given; of "
        "caches, all that there is room for is read at every token.",
        f"Planned in {figures['planned in seconds']:.0f} s" + (
            f", of {60 * figures['minutes']:.0f} for compiling (--minutes={figures['minutes']:g})."
            if figures["minutes"] is not None else ".")]
