import gzip
import json

import jax
import jax.numpy as jnp

from dapo_jax.runtime import profiling


def test_a_wanted_step_leaves_a_timeline_and_no_other_does(tmp_path):
    double = jax.jit(lambda x: jnp.sin(x) * 2)
    for step in (3, 4, 5):
        with profiling.traced(str(tmp_path), step=step, wanted=(4,)):
            double(jnp.ones(8)).block_until_ready()
    trace, = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    assert "step_000004" in trace.parts
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("ph") == "X" and event["dur"] > 0 for event in events)
