"""The plan as tables on a terminal."""

import io
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.table

GIB = 2 ** 30
KINDS = {"parameters": "parameters", "optimizer": "optimizer", "gradients": "summed gradients",
         "reference": "reference model", "weights": "the sampler's weights",
         "prompt_cache": "caches of prompts", "sample_cache": "caches of samples",
         "parked": "contexts of samples that wait"}


def text(figures: Mapping[str, Any]) -> str:
    """All tables and sentences."""
    out = io.StringIO()
    console = rich.console.Console(file=out, width=100)
    console.print(_title(figures))
    for table in (_memory(figures), _collectives(figures), _time(figures)):
        console.print(table)
    for line in _sentences(figures):
        console.print(line)
    return out.getvalue()


def _title(figures: Mapping[str, Any]) -> str:
    mesh = ", ".join(f"{axis} {size}" for axis, size in figures["mesh"].items())
    return (f"{figures['slice']}, mesh {mesh}; the model's shape is from {figures['model']}; rates "
            f"and memory from {figures['chip']['source']}")


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
    outside = {"gradients": "update", "weights": "rollout", "prompt_cache": "rollout",
               "sample_cache": "rollout", "parked": "rollout"}
    for kind, label in KINDS.items():
        if held[kind]:
            side = outside.get(kind)
            table.add_row(label, "" if side == "rollout" else _gib(held[kind]),
                          "" if side == "update" else _gib(held[kind]), "shapes")
    programs = figures["programs"]
    update, prefill, decode = (programs[name] for name in ("update", "prefill", "decode"))
    table.add_row("activations, temporary", _gib(update["temporary"]), "", update["source"])
    table.add_row("temporary: running prompts", "", _gib(prefill["temporary"]), prefill["source"])
    table.add_row("temporary: a token of each row", "", _gib(decode["temporary"]),
                  decode["source"])
    peaks = [figures[side]["peak"] for side in ("update", "rollout")]
    table.add_row("at the peak", *map(_gib, peaks), f"of {_gib(figures['memory'])}",
                  end_section=True)
    return table


def _collectives(figures: Mapping[str, Any]) -> rich.table.Table:
    table = _table("Collectives of one run on each device", "program", "kind", "times", "GiB")
    for name, one in figures["programs"].items():
        for sent in one["sent"]:
            table.add_row(name, sent["kind"], f"{sent['count']:g}", f"{sent['bytes'] / GIB:.4g}")
        if not one["sent"]:
            table.add_row(name, "none", "0", "0")
    return table


def _time(figures: Mapping[str, Any]) -> rich.table.Table:
    table = _table("Seconds of a step at best (no waiting, every peak reached)", "part", "runs",
                   "compute, each", "memory", "links", "all together", "bound")
    for side, names in {"rollout": ("prefill", "decode"), "update": ("update",)}.items():
        one = figures["time"][side]
        for name, runs, each in zip(names, one["runs"], one["each"], strict=True):
            table.add_row(name, f"{runs:g}", *(f"{each[key]:.3g}" for key in
                                               ("compute", "memory", "links")), "", "")
        table.add_row(f"{side}, all", "", "", "", "", f"{one['seconds']:.4g}", one["bound"],
                      end_section=True)
    return table


def _sentences(figures: Mapping[str, Any]) -> list[str]:
    update, rollout, row = figures["update"], figures["rollout"], figures["longest row"]
    lines = list(figures["notes"])
    for what, one in (("update: slots of a microbatch", update), ("rollout: slots", rollout)):
        state = "fits" if one["peak"] <= figures["memory"] else "DOES NOT FIT"
        lines.append(f"{what} on a device: configured {one['slots']:g}, which {state}; the most "
                     f"that fit and a step can use are {one['largest slots']} of "
                     f"{one['rows']} rows ({one['found by']}).")
    fits = "fit" if row["fits"] else "do NOT fit"
    lines.append(f"Responses of {row['completion']} tokens after prompts of {row['prompt']} {fits} "
                 "without context parallelism (each device holds whole rows); with one slot of one "
                 f"row on a device, the rollout's peak is {_gib(rollout['peak of one row'])} GiB.")
    time = figures["time"]
    lines.append(f"Time is for {time['samples']} samples of {time['mean completion']} tokens, each "
                 "prompt sampled once; optimizer steps, rewards and prompts beyond the batch are "
                 "not in it.")
    lines.append(f"Planned in {figures['planned in seconds']:.0f} s.")
    return lines
