"""Run a configuration under many settings, and compare what comes of them.

    python -m dapo_jax.sweep --config=configs/sweeps/quickstart_lr.py --out=DIR --dry-run
    python -m dapo_jax.sweep --config=configs/sweeps/quickstart_lr.py --out=DIR --parallel=2
    python -m dapo_jax.sweep --config=configs/sweeps/quickstart_lr.py --out=DIR --table

The file has, beside get_config(), a function sweep() that returns a list of {field: value}, made by
grid, zip_, random, product, chain, conditional and seeds of dapo_jax.sweeps. All other flags of
dapo_jax.train (but --workdir) hold for every run: --config.a.b, --gin_file, --gin_binding.

Every setting is checked before the first one starts. Each is a run in a process of its own, in
DIR/runs/SETTING; what it prints is in DIR/logs. Started again with the same DIR, finished runs are
left as they are and the others go on; one that fails is named, and stops no other. At the end
DIR/sweep.md, sweep.csv and sweep.png hold each metric by setting: the last value of a run, the mean
over seeds (the field seed) with a 95 % interval. launch/sweep.sh submits the same to SLURM.

exit status: 0 done, 1 some runs failed and are named, 2 bad flags or configuration, 128 + number: a
signal came; start again to go on. With --index: as dapo_jax.train
"""

import argparse
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from dapo_jax import command_line, config, train
from dapo_jax.runtime import processes, status_line
from dapo_jax.studies import jobs, runs, sweep_points, sweep_table

SOME_FAILED = 1
PLAIN_SECONDS = 60.0  # between lines of progress that go to a file


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.sweep", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", required=True,
                        help="of the runs and the table")
    parser.add_argument("--metrics", default="", metavar="NAME,...",
                        help="of the table, as metrics.jsonl names them; default: eval/avg@k and, "
                        "where it is measured, eval/greedy")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--parallel", type=command_line.positive, default=1, metavar="K",
                      help="runs at the same time; 1. They share cores, memory and devices")
    what.add_argument("--index", metavar="I", help="run the setting of this number, from 0 as "
                      "--dry-run lists them, or of this name, in this process")
    what.add_argument("--table", action="store_true", help="write the table of what is there")
    what.add_argument("--dry-run", action="store_true",
                      help="check and list the settings, and how far each is; nothing is started")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    given, flags = _parser().parse_known_args(arguments)
    command_line.check_folder(given.out, flag="out")
    points, values = sweep_points.read(flags, given.out)
    if given.dry_run:
        for place, point in enumerate(points):
            print(place, point.name, _state(point))
        return command_line.DONE
    if given.index is not None:
        return _run_one(sweep_points.find(points, given.index), values)
    if given.table:
        if not any(point.workdir.exists() for point in points):
            raise config.ConfigError(f"--table: {given.out} holds no run of this sweep yet; start "
                                     "it first, by the same command without --table")
        return _finish(given, flags, points, [])
    with command_line.caught_signals() as signals:
        failures = jobs.run([_job(point, given.out, flags) for point in points],
                            at_once=given.parallel, signals=signals,
                            show=status_line.opened(PLAIN_SECONDS))
    for failure in failures:
        print(f"failed: {failure.name}: {failure.text}", file=sys.stderr)
    status = _finish(given, flags, points, failures)
    if signals:
        print(f"signal {signals[0]}: start again with the same flags to go on", file=sys.stderr)
    return 128 + signals[0] if signals else status


def _state(point: sweep_points.Point) -> str:
    if sweep_points.done(point):
        return "done"
    step = runs.newest_step(point.workdir)
    return f"begun, step {step}" if step else "new"


def _run_one(point: sweep_points.Point, values: dict[str, Any]) -> int:
    """Train in this process; a point that is done is left as it is."""
    if sweep_points.done(point):
        print(f"{point.name}: done before")
        return command_line.DONE
    train.LOG.setLevel(logging.INFO)
    processes.start(processes.from_flags(values))
    status = train.train(point.cfg, str(point.workdir))
    if status == command_line.DONE and processes.main():
        sweep_points.finish(point)
    return status


def _job(point: sweep_points.Point, out: pathlib.Path, flags: Sequence[str]) -> jobs.Job:
    # By its name: the file may be changed while runs wait, and then an index is another's.
    return jobs.Job(
        point.name, ("-m", "dapo_jax.sweep", *flags, f"--out={out}", f"--index={point.name}"),
        runs.log(out, point.name), done=lambda: sweep_points.done(point),
        status=lambda: f"step {runs.newest_step(point.workdir)}")


def _finish(given: argparse.Namespace, flags: Sequence[str],
            points: Sequence[sweep_points.Point], failures: Sequence[jobs.Failure]) -> int:
    """Write the table; the exit status says whether all is in it."""
    metrics = tuple(name for name in given.metrics.split(",") if name)
    paths = sweep_table.write(given.out, points, metrics or sweep_table.usual(points),
                              failed={failure.name for failure in failures}, flags=flags)
    print(*paths, sep="\n")
    return SOME_FAILED if failures else command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
