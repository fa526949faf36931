"""Measure here what a source reports, and say what agrees: one command per study.

    python -m dapo_jax.reproduce                                    lists the studies
    python -m dapo_jax.reproduce token_loss --out=DIR --quick
    python -m dapo_jax.reproduce dynamic_batching --out=DIR [--only=a,b,c] [--seeds=3] [--jobs=1]
    python -m dapo_jax.reproduce page --results=DIR --out=DIR       one page of all studies

Every run is a work directory under DIR; started again with the same DIR, finished runs are left as
they are and the others go on. The page DIR/STUDY.md and its figures are written from all that is
there, also where runs failed. --quick takes a few steps of a tiny model, to see that it works.
`page` gathers DIR/STUDY_lines.json or DIR/STUDY/STUDY_lines.json, which studies leave beside their
pages, into OUT/reproduction.md.

exit status: 0 done, 1 some runs failed and the page says which, 2 bad flags or data, 128 + number:
a signal came; start again to go on
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from dapo_jax import command_line, config
from dapo_jax.runtime import status_line
from dapo_jax.studies import ablation, base, baselines, dynamic_batching, gathered, token_loss

STUDIES = {"dynamic_batching": dynamic_batching.STUDY, "token_loss": token_loss.STUDY,
           "baselines": baselines.STUDY, "ablation": ablation.STUDY}
PAGE = "page"
RESULTS = pathlib.Path("docs/studies")
SOME_FAILED = 1
PLAIN_SECONDS = 60.0  # between lines of progress that go to a file
MOST_SEEDS = 100


def _listed() -> str:
    """The studies and their parts."""
    return "\n".join(f"{name}\n" + "\n".join(
        f"  {part}  {text}" for part, text in study.parts.items())
        for name, study in STUDIES.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.reproduce", allow_abbrev=False,
        description=f"{__doc__}\nstudies and their parts:\n\n{_listed()}",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=(*STUDIES, PAGE), nargs="?")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR",
                        help="of the runs and the page")
    parser.add_argument("--results", type=pathlib.Path, metavar="DIR", help="page: what studies "
                        f"left; {RESULTS} holds what is published", default=RESULTS)
    parser.add_argument("--only", default="", metavar="PART,...", help="parts to run; default: all")
    parser.add_argument("--seeds", type=command_line.positive, default=3,
                        help="runs of each kind; 3")
    parser.add_argument("--jobs", type=command_line.positive, default=1,
                        help="runs at the same time; 1. More of them disturb each other's times")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    return parser


def _options(given: argparse.Namespace) -> base.Options:
    known = STUDIES[given.study].parts
    only = tuple(part for part in given.only.split(",") if part) or tuple(known)
    if wrong := [part for part in only if part not in known]:
        raise config.ConfigError(f"--only={given.only}: {given.study} has no part {wrong[0]!r}, "
                                 f"only {', '.join(known)}")
    if given.seeds > MOST_SEEDS:
        raise config.ConfigError(f"--seeds={given.seeds}: at most {MOST_SEEDS}")
    return base.Options(given.out, given.quick, only, given.seeds, given.jobs)


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.study is None:
        print(_listed())
        return command_line.DONE
    if given.out is None:
        parser.error("--out=DIR is missing")
    command_line.check_folder(given.out, flag="out")
    if given.study == PAGE:
        print(gathered.write(given.results, given.out, list(STUDIES)))
        return command_line.DONE
    options = _options(given)
    with command_line.caught_signals() as signals:
        result = STUDIES[given.study].run(options, signals, status_line.opened(PLAIN_SECONDS))
    for failure in result.failures:
        print(f"failed: {failure.name}: {failure.text}", file=sys.stderr)
    print(*result.paths, sep="\n")
    if signals:
        return 128 + signals[0]
    return SOME_FAILED if result.failures else command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
