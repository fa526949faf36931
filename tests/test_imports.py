"""What may import what: a file of the package uses only files that stand on a lower floor."""

import ast
import fnmatch
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "dapo_jax"

# From the ground up. A file stands on the highest floor that names it.
FLOORS = (
    ("config", "config_*", "types", "types_*", "reductions", "command_line", "sweeps",
     "config_reference"),
    ("dynamic_sampling.*", "buffer.*", "learner.*", "models.*", "rollout.draw", "rollout.decode",
     "rollout.seating", "rollout.ledger", "rollout.bounds", "rollout.stops", "rollout.turns",
     "rollout.parked", "rollout.lobby"),
    ("runtime.*", "text.*", "data.*", "envs.*"),
    ("learner.stacks", "learner.train_states", "learner.update", "learner.step",
     "learner.features", "rollout.programs",
     "rollout.engine", "rollout.resharding", "rollout.parking", "rollout.talking",
     "rollout.outcomes", "rollout.episodes_talk", "rollout.episodes_log", "rollout.collect",
     "rollout.streaming"),
    ("setup", "setup_adapter", "setup_environment", "setup_phases", "phases", "planning.*"),
    ("evaluate", "calibration", "agreement"),
    ("journal",),
    ("train", "report", "export", "generate", "profile_prompts", "simulate", "plan",
     "replay_episodes"),
    ("bench", "studies.*", "reproduce", "sweep", "self_test",
     "doctor"),
)


def modules():
    """Name without the package -> file; packages themselves are left out."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {".".join(f.relative_to(ROOT / PACKAGE).with_suffix("").parts): f
            for f in files if f.name != "__init__.py"}


def imported(path, known):
    """Modules of the package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    inner = {name.removeprefix(PACKAGE + ".") for name in found if name.startswith(PACKAGE + ".")}
    return inner & known


def graph():
    files = modules()
    return {name: imported(path, set(files)) for name, path in files.items()}


def floor(name):
    named = [height for height, patterns in enumerate(FLOORS)
             if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not named:
        pytest.fail(f"{name} stands on no floor: give it one in FLOORS")
    return max(named)


def test_a_file_imports_only_what_stands_no_higher():
    wrong = [f"{name} (floor {floor(name)}) imports {other} (floor {floor(other)})"
             for name, others in graph().items() for other in others if floor(other) > floor(name)]
    assert not wrong


def test_no_file_imports_itself_through_others():
    links = graph()
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path[path.index(name):], name])
        if name not in done:
            for other in sorted(links[name]):
                visit(other, [*path, name])
            done.add(name)

    for name in links:
        visit(name, [])
    assert len(done) > 30  # the walk saw the package


def test_only_the_seam_moves_data_between_host_and_device():
    for name, path in modules().items():
        calls = {node.attr for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                 and node.value.id == "jax"}
        if name != "runtime.mesh":
            assert not calls & {"device_put", "device_get"}, name


def test_package_files_are_empty():
    for path in (ROOT / PACKAGE).rglob("__init__.py"):
        assert path.read_text() == "", path
    for folder in (ROOT / PACKAGE).rglob("*/"):
        if any(folder.glob("*.py")):
            assert (folder / "__init__.py").exists(), folder


def test_oracles_import_nothing_of_the_package():
    for name in ("reference", "plain_model"):
        assert PACKAGE not in (ROOT / "tests" / f"{name}.py").read_text().split('"""', 2)[2]
