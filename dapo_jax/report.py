"""Draw one or several runs into one HTML page, or serve that page while they train.

    python -m dapo_jax.report runs/quickstart
    python -m dapo_jax.report runs/one runs/two --out=runs/both
    python -m dapo_jax.report runs/quickstart --serve --port=8000

Writes OUT/report.html (self-contained) and OUT/report/*.png, where OUT is the first DIR unless
given. Several runs are overlaid; those that differ in their seed only are one setting, drawn as
mean and band and compared with the first one. Reads metrics.jsonl, config.json, eval/ and samples/
of each DIR and writes nothing there but the page.

With --serve nothing is written: the page is served at http://127.0.0.1:PORT and renews itself while
the runs go on, until Ctrl-C. It is read-only and for this machine only; --host=ADDRESS opens it to
others, without a password. From another machine: ssh -L 8000:127.0.0.1:8000 MACHINE
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

from dapo_jax import command_line, config
from dapo_jax.runtime import page, panels, plots, report_data, report_server, run_files

PORT = 8000


def write(runs: Sequence[run_files.Run], out: pathlib.Path) -> pathlib.Path:
    """Write OUT/report.html and OUT/report/*.png; returns the page's path."""
    lines = {run.name: run.lines for run in runs}
    folder = out / "report"
    folder.mkdir(parents=True, exist_ok=True)
    for panel in panels.PANELS:
        path, image = folder / f"{panel.name}.png", plots.draw(panel, lines)
        path.unlink(missing_ok=True)  # an earlier report may have had it
        if image:
            path.write_bytes(image)
    target = out / "report.html"
    target.write_text(page.render(report_data.payload(runs, live=False)), encoding="utf-8")
    return target


def read(workdirs: Sequence[pathlib.Path], *, empty: bool = False) -> list[run_files.Run]:
    """The runs of the directories; `empty`: also where no step is logged yet."""
    rows = report_data.rows_each(len(workdirs))
    return [run_files.read(path, name=name, rows=rows, empty=empty)
            for path, name in zip(workdirs, _names(workdirs), strict=True)]


def _names(workdirs: Sequence[pathlib.Path]) -> list[str]:
    """Last parts of the paths, as many as tell them apart."""
    paths = [path.resolve() for path in workdirs]
    for parts in range(1, max(len(path.parts) for path in paths)):
        names = [os.sep.join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def source(workdirs: Sequence[pathlib.Path]) -> report_server.Source:
    """What is served of the directories."""

    def files() -> Mapping[str, Callable[[], bytes]]:
        return {f"/run/{place}/{name}": (workdir / name).read_bytes
                for place, workdir in enumerate(workdirs)
                for name in run_files.pages(workdir)}

    return report_server.Source(
        lambda: [run_files.stamp(workdir) for workdir in workdirs],
        lambda: report_data.payload(read(workdirs, empty=True), live=True), files)


def serve(workdirs: Sequence[pathlib.Path], *, host: str, port: int) -> None:
    """Serve the page until an interrupt. ConfigError where a directory or the port is no good."""
    read(workdirs, empty=True)
    with report_server.opened(source(workdirs), host=host, port=port) as server:
        print(f"http://{host}:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.report", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__, allow_abbrev=False)
    parser.add_argument("workdir", nargs="+", type=pathlib.Path, metavar="DIR",
                        help="work directory of a run; several are overlaid")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR",
                        help="where report.html and report/ go; default: the first DIR")
    parser.add_argument("--serve", action="store_true", help="serve the page, write nothing")
    parser.add_argument("--host", help="with --serve: address to listen on; 127.0.0.1, this "
                        "machine only")
    parser.add_argument("--port", type=int, help=f"with --serve: port; {PORT}, 0: any that is free")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 if a directory holds no run or cannot be written."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.serve and given.out:
        parser.error("--out has no effect with --serve: nothing is written")
    if not given.serve and (given.host is not None or given.port is not None):
        parser.error("--host and --port have no effect without --serve")
    workdirs = list(dict.fromkeys(given.workdir))
    try:
        if given.serve:
            serve(workdirs, host=given.host or report_server.LOOPBACK[0],
                  port=PORT if given.port is None else given.port)
        else:
            command_line.check_folder(given.out or workdirs[0], flag="out")
            print(write(read(workdirs), given.out or workdirs[0]))
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return command_line.BAD_INPUT
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
