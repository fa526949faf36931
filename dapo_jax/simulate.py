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
import pathlib
import sys
from collections.abc import Callable, Sequence

from dapo_jax import command_line
from dapo_jax.dynamic_sampling import comparison, policies, simulation
from dapo_jax.runtime import comparison_page

Progress = Callable[[str], None]


def reference(given: argparse.Namespace, progress: Progress) -> list[comparison_page.Section]:
    """The reference simulation: prompts drawn fresh each time."""
    costs = simulation.Costs(given.round_cost, given.prompt_cost / given.groups)
    sections = []
    for samples in given.samples:
        world = simulation.Reference(groups=given.groups, samples=samples, steps=given.steps,
                                     pool=20 * given.groups)
        traces = {policy.name: [] for policy in policies.reference(costs, samples)}
        for number in range(given.runs):
            progress(f"G = {samples}: run {number + 1} of {given.runs}")
            flags = simulation.reference_flags(world, seed=[given.seed, samples, number])
            for policy in policies.reference(costs, samples):
                traces[policy.name].append(simulation.run(
                    policy, simulation.pool_draw(flags, samples), groups=given.groups,
                    steps=given.steps, costs=costs))
        first = min(comparison.WARM_UP, given.steps // 4)
        sections.append(comparison_page.Section(
            f"G = {samples}", tuple(comparison.rows(traces, base=policies.BASE, first=first))))
    return sections


def _reference_page(given: argparse.Namespace, progress: Progress) -> None:
    first = min(comparison.WARM_UP, given.steps // 4)
    notes = (f"N = {given.groups}; p ~ Beta(1, 10.2) at the start, logit p rises by 0.81 over 400 "
             "steps, a fresh p for every prompt.",
             f"A round of n prompts takes {given.round_cost:g} + {given.prompt_cost:g} (n / N) G "
             f"seconds. Means of steps {first} to {given.steps}, {given.runs} runs; saved: against "
             f"`{policies.BASE}`, paired.",
             "Brackets: 95 % intervals, Student's over runs.")
    _publish(given, "reference", "Dynamic sampling: the reference simulation",
             reference(given, progress), notes)


def _publish(given: argparse.Namespace, name: str, title: str,
             sections: Sequence[comparison_page.Section], notes: Sequence[str]) -> None:
    comparison_page.show(sections)
    for note in notes:
        print(note)
    if given.out:
        settings = {key: str(value) if isinstance(value, pathlib.Path) else value
                    for key, value in vars(given).items()}
        for path in comparison_page.write(given.out, name, title=title, sections=sections,
                                          notes=notes, settings=settings):
            print(path)


def _progress() -> Progress:
    """Lines on standard error: in place on a terminal, silent elsewhere."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


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
    _reference_page(given, progress)
    progress("")
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
