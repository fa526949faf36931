"""What policies of dynamic sampling cost in seconds, without a model.

    python -m dapo_jax.simulate                          # fresh prompts: the reference table
    python -m dapo_jax.simulate --persistent             # a table of prompts with a history
    python -m dapo_jax.simulate --replay=runs/recorded   # the outcomes of a recorded run
    python -m dapo_jax.simulate --fit=runs/recorded      # constants of `window` for that run
    python -m dapo_jax.simulate --fit-costs=runs/recorded    # seconds of a round against its size

Prints tables on standard output; --out=DIR also writes them as Markdown, PNG and JSON. Example:

    python -m dapo_jax.simulate --runs=12 --steps=400 --samples=8,16,32 --out=runs/simulation

A recorded run samples a fixed, over-sized pool per step and keeps all its samples: train with
--config.dynamic_sampling.predictor.kind=fixed --config.dynamic_sampling.predictor.multiplier=6
--config.dynamic_sampling.carry_steps=0 and log.samples_per_step = 0.

exit status: 0 done, 2 bad flags or data
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence

from dapo_jax import command_line
from dapo_jax.dynamic_sampling import comparison, persistent, policies, simulation, studies
from dapo_jax.runtime import comparison_page, metrics


@dataclasses.dataclass(frozen=True)
class Page:
    """What a command found."""

    name: str  # of the files
    title: str
    sections: Sequence[comparison.Section]
    notes: Sequence[str]


def _reference(given: argparse.Namespace, progress: studies.Progress) -> Page:
    first = studies.warm_up(given.steps)
    notes = (f"N = {given.groups}; p ~ Beta(1, 10.2) at the start, logit p rises by 0.81 over 400 "
             "steps, a fresh p for every prompt.",
             f"{_cost_note(given)} Means of steps {first} to {given.steps}, {given.runs} runs.",
             f"Saved: against `{policies.BASE}`, paired on the same outcomes. ±: 95 % "
             "intervals, Student's over runs.")
    sections = studies.reference(samples=given.samples, groups=given.groups, runs=given.runs,
                                 steps=given.steps, seed=given.seed, costs=_costs(given),
                                 progress=progress)
    return Page("reference", "Dynamic sampling: the reference simulation", sections, notes)


def _persistent(given: argparse.Namespace, progress: studies.Progress) -> Page:
    world = persistent.World()
    common = dict(samples=given.samples, groups=given.groups, runs=given.runs, seed=given.seed,
                  costs=_costs(given), progress=progress)
    notes = (
        f"{world.prompts} prompts of their own p ~ Beta({world.a:g}, {world.b:g}); logit p rises "
        f"by {world.rise:g} over {world.rise_steps} steps, times 1 + {world.spread:g} z for each "
        f"prompt, and wanders by {world.wander:g} (standard deviation after as many steps).",
        f"N = {given.groups}. All policies make as many updates as `{policies.WINDOW}` makes in "
        f"{world.epochs} epochs, of N groups of G samples each, on the same answers; the first "
        f"steps count too. {_cost_note(given)}",
        f"Gap: between `{policies.WINDOW}` and the oracle that draws only informative prompts. "
        f"±: 95 % intervals, Student's over {given.runs} runs, paired.",
        "Carry: at most one step and a quarter of a batch, unless the row says otherwise. `carried`: "
        "share of trained groups that waited; `age`: mean steps that trained groups waited.",
        "Effective prompts: how many prompts would hold the informative visits if all had as many "
        "(1 / sum of squared shares), in % of the table.")
    sections = studies.persistents(**common)
    if given.sensitivity:
        sections += studies.sensitivity(**common)
    return Page("persistent", "Dynamic sampling over a table of prompts", sections, notes)


def _costs(given: argparse.Namespace) -> simulation.Costs:
    return simulation.Costs(given.round_cost, given.prompt_cost / given.groups)


def _cost_note(given: argparse.Namespace) -> str:
    return (f"A round of n prompts takes {given.round_cost:g} + {given.prompt_cost:g} (n / N) G "
            "seconds.")


def _publish(given: argparse.Namespace, page: Page) -> None:
    comparison_page.show(page.sections)
    for note in page.notes:
        print(note)
    if given.out:
        settings = {key: str(value) if isinstance(value, pathlib.Path) else value
                    for key, value in vars(given).items()}
        for path in comparison_page.write(
                given.out, page.name, title=page.title, sections=page.sections, notes=page.notes,
                settings=settings):
            print(path)


def _progress() -> studies.Progress:
    """Shows a line on standard error: in place on a terminal, else one every few seconds."""
    terminal, shown = sys.stderr.isatty(), [time.monotonic()]

    def show(text: str) -> None:
        if terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text and time.monotonic() - shown[0] >= metrics.PLAIN_SECONDS:
            shown[0] = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return show


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _sizes(text: str) -> list[int]:
    values = [_positive(part) for part in text.split(",")]
    if min(values) < 2:
        raise argparse.ArgumentTypeError("a group of one sample is never informative")
    return values


def _cost(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.simulate", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--persistent", action="store_true",
                      help="prompts with a pass rate of their own, visited again and again")
    for name, text in (("replay", "replay the policies on the outcomes recorded in DIR/samples"),
                       ("fit", "fit the constants of `window` to the run in DIR"),
                       ("fit-costs", "fit the seconds of a round in DIR/metrics.jsonl")):
        kind.add_argument(f"--{name}", type=pathlib.Path, metavar="DIR", help=text)
    parser.add_argument("--sensitivity", action="store_true",
                        help="persistent: also under other drifts of the prompts")
    parser.add_argument("--runs", type=_positive, default=12, help="independent runs; 12")
    parser.add_argument("--steps", type=_positive, default=400, help="steps of a run; 400")
    parser.add_argument("--samples", type=_sizes, default=[8, 16, 32], metavar="G,G,...",
                        help="samples of a group; 8,16,32")
    parser.add_argument("--groups", type=_positive, default=32, help="N, groups of a batch; 32")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers; 1")
    parser.add_argument("--round-cost", type=_cost, default=77.9,
                        help="seconds of a round beside its prompts; 77.9")
    parser.add_argument("--prompt-cost", type=_cost, default=1.80,
                        help="seconds of a round per n G / N; 1.80")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR",
                        help="also write Markdown, PNG and JSON there")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    given = _parser().parse_args(arguments)
    progress = _progress()
    page = (_persistent if given.persistent else _reference)(given, progress)
    progress("")
    _publish(given, page)
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
