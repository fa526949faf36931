"""Admission and decoding at the widths of real models, compiled by the real TPU compiler for slices
that are not there: memory, and what a token sends between chips. Four layers each, to be quick."""

import dataclasses
import math
import re

import pytest
import tiny

from dapo_jax.models import cost, presets
from dapo_jax.rollout import draw

pytestmark = [
    pytest.mark.tpu, pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")]
LAYERS, ROWS = 4, 4
BYTES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a slice."""

    slice: str
    preset: str
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    slots: int
    length: int  # of prompts, and of completions


CASES = [Case("v5e:2x2", "qwen2.5-1.5b", (1, 4, 1), 128, 512),
         Case("v5e:2x2", "qwen2.5-1.5b", (1, 2, 2), 128, 512),
         Case("v5p:4x8x8", "qwen2.5-32b", (4, 8, 8), 256, 1024)]


@pytest.fixture(scope="module", params=CASES, ids=["1.5b", "1.5b, tensor 2", "32b"])
def compiled(request):
    """The case, its spec and its engine."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: no TPU compiler")
    from jax.experimental import topologies
    case = request.param
    chips = topologies.get_topology_desc(platform="tpu", topology_name=case.slice).devices
    spec = dataclasses.replace(presets.spec(case.preset, compute_dtype="bfloat16"), layers=LAYERS)
    how = draw.Sampling(max_new_tokens=case.length, stop_ids=(0,))
    return case, spec, tiny.engine(spec, how, on=tiny.mesh(*case.mesh, devices=list(chips)),
                                   rows=ROWS, slots=(case.slots,), buckets=(case.length,))


def test_caches_are_changed_in_place_and_a_prompt_s_is_there_once(compiled):
    case, spec, engine = compiled
    tokens = case.slots * case.length * (1 + ROWS)  # tiled, the prompts' share would be ROWS
    cache = cost.cache_bytes(spec, tokens, bytes_per_number=2) / math.prod(case.mesh)
    for program in (engine.programs.admit[case.slots, case.length],
                    engine.programs.decode[case.slots]):
        memory = program.memory_analysis()
        assert cache <= memory.output_size_in_bytes < 1.02 * cache  # not padded to tiles either
        assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes
        assert memory.temp_size_in_bytes < cache


def collectives(program):
    """(operation, bytes of its results) of each in the program's text; a loop's body is there
    once."""
    pattern = r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    found = []
    for line in program.as_text().splitlines():
        if one := re.search(pattern + r"(-start)?\(", line):
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", one[1])
            found.append((one[2], [
                BYTES[kind] * math.prod(map(int, filter(None, sizes.split(","))))
                for kind, sizes in shapes]))
    return found


def test_a_token_sends_two_sums_a_layer_and_never_a_vocabulary_or_weights(compiled):
    case, spec, engine = compiled
    data, fsdp, tensor = case.mesh
    rows = case.slots * ROWS // (data * fsdp)  # of one chip
    sent = collectives(engine.programs.decode[case.slots])
    hidden = [sizes for kind, sizes in sent if sizes == [rows * spec.d_model * 2]]
    # Attention's and the feed-forward's output in each layer, and the embedding.
    assert len(hidden) == (2 * LAYERS + 1 if tensor > 1 else 0), sent
    rest = sum(sum(sizes) for _, sizes in sent if sizes not in hidden)
    vocabulary = rows * spec.vocab * 4
    assert rest < (vocabulary / 64 if tensor > 1 else 1000), sent
    moved = collectives(engine.programs.admit[case.slots, case.length])
    assert not moved, moved
