"""What policies of dynamic sampling cost in seconds, without a model.

    python -m dapo_jax.simulate                          # fresh prompts: the reference table
    python -m dapo_jax.simulate --persistent             # a table of prompts with a history
    python -m dapo_jax.simulate --replay=runs/recorded   # the outcomes of a recorded run
    python -m dapo_jax.simulate --fit=runs/recorded      # constants of `window` for that run
    python -m dapo_jax.simulate --fit-costs runs/a runs/b    # seconds of a round against its size

Prints tables on standard output; --out=DIR also writes them as Markdown, PNG and JSON. Example:

    python -m dapo_jax.simulate --runs=12 --steps=400 --samples=8,16,32 --out=runs/simulation

A recorded run samples a fixed, over-sized pool per step and keeps all its samples: train with
--config.dynamic_sampling.predictor.kind=fixed --config.dynamic_sampling.predictor.multiplier=6
--config.dynamic_sampling.carry_steps=0 and log.samples_per_step = 0.

exit status: 0 done, 2 bad flags or data
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax import command_line, config
from dapo_jax.dynamic_sampling import comparison, fit, persistent, policies, simulation, studies
from dapo_jax.runtime import comparison_page, fit_page, metrics, recording, status_line

GROUPS, ROUND_COST, PROMPT_COST = 32, 77.9, 1.80  # of the reference simulation

@dataclasses.dataclass(frozen=True)
class Page:
    """What a command found."""

    name: str  # of the files
    title: str
    sections: Sequence[comparison.Section]
    notes: Sequence[str]


def _reference(given: argparse.Namespace, progress: studies.Progress) -> Page:
    first, groups = studies.warm_up(given.steps), given.groups or GROUPS
    notes = (f"N = {groups}; p ~ Beta(1, 10.2) at the start, logit p rises by 0.81 over 400 steps, "
             "a fresh p for every prompt.",
             f"{_cost_note(given)} Means of steps {first} to {given.steps}, {given.runs} runs.",
             f"Saved: against `{policies.BASE}`, paired on the same outcomes. ±: 95 % "
             "intervals, Student's over runs.")
    sections = studies.reference(samples=given.samples, groups=groups, runs=given.runs,
                                 steps=given.steps, seed=given.seed, costs=_costs(given),
                                 progress=progress)
    return Page("reference", "Dynamic sampling: the reference simulation", sections, notes)


def _persistent(given: argparse.Namespace, progress: studies.Progress) -> Page:
    return Page("persistent", "Dynamic sampling over a table of prompts",
                studies.persistents(**_table_study(given, progress)), (*_world_notes(given), (
        "Carry: at most one step and a quarter of a batch, unless the row says otherwise. "
        "`carried`: share of trained groups that waited; `age`: mean steps that trained groups "
        "waited."), (
        "Effective prompts: how many prompts would hold the informative visits if all had as many "
        "(1 / sum of squared shares), in % of the table.")))


def _sensitivity(given: argparse.Namespace, progress: studies.Progress) -> Page:
    return Page("sensitivity", f"{policies.DEFAULT} under other drifts",
                studies.sensitivity(**_table_study(given, progress)), _world_notes(given))


def _table_study(given: argparse.Namespace, progress: studies.Progress) -> dict[str, Any]:
    return dict(samples=given.samples, groups=given.groups or GROUPS, runs=given.runs,
                seed=given.seed, costs=_costs(given), progress=progress)


def _world_notes(given: argparse.Namespace) -> tuple[str, ...]:
    world = persistent.World()
    return (
        f"{world.prompts} prompts of their own p ~ Beta({world.a:g}, {world.b:g}); logit p rises "
        f"by {world.rise:g} over {world.rise_steps} steps, times 1 + {world.spread:g} z for each "
        f"prompt, and wanders by {world.wander:g} (standard deviation after as many steps).",
        f"N = {given.groups or GROUPS}. All policies make as many updates as `{policies.WINDOW}` "
        f"makes in {world.epochs} epochs, of N groups of G samples each, on the same answers; the "
        f"first steps count too. {_cost_note(given)}",
        f"Gap: between `{policies.WINDOW}` and the oracle that draws only informative prompts. "
        f"±: 95 % intervals, Student's over {given.runs} runs, paired.")


def _replay(given: argparse.Namespace, progress: studies.Progress) -> Page:
    found = recording.pools(given.replay)
    sizes = np.concatenate(found.samples)
    samples = int(np.bincount(sizes).argmax())
    groups, costs, note = _of_run(given, given.replay)
    section = studies.replay(found.informative, found.samples, samples=samples, groups=groups,
                             costs=costs, progress=progress)
    first = studies.settling(len(found.steps))
    notes = (
        f"{len(found.steps)} recorded steps of {given.replay}, {len(sizes) / len(found.steps):.0f} "
        f"prompts each on average, N = {groups}; means leave out the first {first}.",
        note, f"Saved: against `{policies.BASE}`, paired on the same outcomes. [Low, high]: 95 % "
        f"intervals, bootstrap over blocks of {comparison.BLOCK} steps (at most a quarter).",
        "*k: in k steps the policy asked for more prompts than were recorded; these steps are left "
        "out of its means and pairs, and nothing was put in their place.")
    return Page("replay", f"Policies replayed on {given.replay.name}", [section], notes)


def _fit(given: argparse.Namespace, progress: studies.Progress) -> fit_page.Fitted:
    counts = recording.counts(given.fit)
    groups, costs, note = _of_run(given, given.fit)
    if len(counts.step) < fit.LEAST_STEPS:
        raise config.ConfigError(f"--fit={given.fit}: {len(counts.step)} steps sampled prompts; a "
                                 f"fit with steps held out takes {fit.LEAST_STEPS}")
    samples = round(float(np.nanmean(counts.samples / counts.asked)))
    study = fit.study(counts.asked, counts.informative, groups=groups, samples=samples,
                      costs=costs, seed=given.seed, progress=progress)
    return fit_page.Fitted(study, counts.step.astype(int), (
        f"N = {groups}, G = {samples}. {note}",
        "Expected seconds: the prompts of a step in random order, others beyond them at the run's "
        f"rate, one further round for the rest. Held out: the last {1 - fit.TRAINED:.0%} of steps.",
        "q scales both ratios, so the larger ratio is held at 1."))


def _fit_costs(given: argparse.Namespace) -> None:
    costs = _round_costs(given.fit_costs)
    groups = _groups(given, given.fit_costs[0])
    print(f"seconds of a round = {costs.round:.4g} + {costs.sample:.4g} n G: R2 = "
          f"{costs.r_squared:.4f}, residual standard deviation {costs.deviation:.3g} s, "
          f"{costs.steps} steps\n--round-cost={costs.round:.6g} "
          f"--prompt-cost={costs.sample * groups:.6g}  (N = {groups})")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        target = given.out / "costs.json"
        target.write_text(json.dumps(metrics.plain(dataclasses.asdict(costs))) + "\n",
                          encoding="utf-8")
        print(target)


def _groups(given: argparse.Namespace, workdir: pathlib.Path) -> int:
    return given.groups or int(recording.settings(workdir).get("prompts_per_step", GROUPS))


def _round_costs(workdirs: Sequence[pathlib.Path]) -> fit.Costs:
    """Of the steps that compiled nothing: a program's first call takes longer."""
    found = [recording.counts(workdir) for workdir in workdirs]
    seconds, rounds, samples, compiles = (
        np.concatenate([getattr(counts, name) for counts in found])
        for name in ("seconds", "rounds", "samples", "compiles"))
    use = np.isfinite(seconds + rounds + samples) & ~(compiles > 0)
    return fit.round_costs(seconds[use], rounds[use], samples[use])


def _of_run(given: argparse.Namespace,
            workdir: pathlib.Path) -> tuple[int, simulation.Costs, str]:
    """N, costs, and where these come from: flags, else the run itself."""
    groups = _groups(given, workdir)
    if given.round_cost and given.prompt_cost:
        costs, source = simulation.Costs(given.round_cost, given.prompt_cost / groups), "as given"
    else:
        try:
            found = _round_costs([workdir])
        except config.ConfigError as error:
            raise config.ConfigError(f"{error}; or give --round-cost and --prompt-cost") from error
        if min(found.round, found.sample) <= 0:
            raise config.ConfigError(
                f"{workdir}: the fitted seconds are {found.round:.3g} a round and "
                f"{found.sample:.3g} a sample; give --round-cost and --prompt-cost")
        costs = simulation.Costs(found.round, found.sample)
        source = f"fitted to this run, R2 = {found.r_squared:.3f}"
    return groups, costs, (f"A round of n prompts takes {costs.round:.4g} + {costs.sample:.4g} n G "
                           f"seconds, {source}.")


def _costs(given: argparse.Namespace) -> simulation.Costs:
    return simulation.Costs(given.round_cost or ROUND_COST,
                            (given.prompt_cost or PROMPT_COST) / (given.groups or GROUPS))


def _cost_note(given: argparse.Namespace) -> str:
    return (f"A round of n prompts takes {given.round_cost or ROUND_COST:g} + "
            f"{given.prompt_cost or PROMPT_COST:g} (n / N) G seconds.")


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


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def _sizes(text: str) -> list[int]:
    values = [command_line.positive(part) for part in text.split(",")]
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
                       ("fit", "fit the constants of `window` to the run in DIR")):
        kind.add_argument(f"--{name}", type=pathlib.Path, metavar="DIR", help=text)
    kind.add_argument("--fit-costs", type=pathlib.Path, metavar="DIR", nargs="+",
                      help="fit the seconds of a round in DIR/metrics.jsonl, of all DIRs together")
    parser.add_argument("--sensitivity", action="store_true",
                        help="persistent: also under other drifts of the prompts")
    parser.add_argument("--runs", type=command_line.positive, default=12,
                        help="independent runs; 12")
    parser.add_argument("--steps", type=command_line.positive, default=400,
                        help="steps of a run; 400")
    parser.add_argument("--samples", type=_sizes, default=[8, 16, 32], metavar="G,G,...",
                        help="samples of a group; 8,16,32")
    parser.add_argument("--groups", type=command_line.positive,
                        help="N, groups of a batch; default: the recorded run's, else 32")
    parser.add_argument("--seed", type=_seed, default=1, help="of all random numbers; 1")
    parser.add_argument("--round-cost", type=_cost, metavar="SECONDS",
                        help="of a round beside its prompts; default: fitted to the recorded run, "
                        f"else {ROUND_COST}")
    parser.add_argument("--prompt-cost", type=_cost, metavar="SECONDS",
                        help="of a round per n G / N; default: fitted to the recorded run, else "
                        f"{PROMPT_COST}")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR",
                        help="also write Markdown, PNG and JSON there")
    return parser


def _check(given: argparse.Namespace) -> None:
    if given.sensitivity and not given.persistent:
        raise config.ConfigError("--sensitivity belongs to --persistent")
    if (given.replay or given.fit) and bool(given.round_cost) != bool(given.prompt_cost):
        raise config.ConfigError("--round-cost and --prompt-cost of a recorded run are given both, "
                                 "or both fitted to it: give the other too, or neither")
    if given.out:
        command_line.check_folder(given.out, flag="out")


def _studies(given: argparse.Namespace) -> list[Callable[..., Page]]:
    if given.persistent:
        return [_persistent, _sensitivity] if given.sensitivity else [_persistent]
    return [_replay] if given.replay else [_reference]


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    given = _parser().parse_args(arguments)
    _check(given)
    progress = status_line.opened()
    if given.fit_costs:
        _fit_costs(given)
    elif given.fit:
        found = _fit(given, progress)
        progress("")
        print(fit_page.markdown(found))
        if given.out:
            print(*fit_page.write(given.out, found), sep="\n")
    else:
        for study in _studies(given):
            page = study(given, progress)
            progress("")
            _publish(given, page)
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
