"""The count of an update's temporary bytes against programs compiled for the CPU."""

import pytest
from test_planning import small
from test_planning_parts import both

from dapo_jax.planning import estimate, programs, sources
from dapo_jax.runtime import mesh as mesh_lib

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_of_rows_of_128_tokens_in_plain_attention_up_to_15_percent_more_is_counted(remat):
    """On one device; docs/planner.md says where it is less close."""
    plan = programs.plan(small(**{
        "model.remat": remat, "model.attention": "xla", "model.layers": 4, "model.d_model": 128,
        "model.head_size": 32, "model.ff": 384, "prompts.buckets": (64,),
        "rollout.max_new_tokens": 128}), backend="cpu")
    real, abstract = both(plan, (1, 1, 1))
    program = sources.one(real, "update")
    found = mesh_lib.compiled(program.function, real.trained, *program.arguments)
    temporary = found.memory_analysis().temp_size_in_bytes
    assert temporary <= estimate.of_update(plan, abstract).temporary <= 1.15 * temporary
