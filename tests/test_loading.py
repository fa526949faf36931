import json
import pathlib
import subprocess
import sys

import hf_models
import jax
import numpy as np
import pytest
import tiny

from dapo_jax.models import families, hf, hf_config, safetensors_file, transformer
from dapo_jax.models import spec as specs
from dapo_jax.runtime import loading
from dapo_jax.runtime import mesh as mesh_lib


def like(spec, mesh):
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    return mesh_lib.structs(shapes, mesh_lib.param_shardings(mesh, spec))


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def folder(request, tmp_path_factory):
    made = hf_models.model(request.param, num_hidden_layers=2)
    return hf.open(hf_models.save(made, tmp_path_factory.mktemp("model"), max_shard_size="20KB"))


@pytest.mark.parametrize("parts", [(1, 1, 1), (1, 2, 2), (2, 2, 1), (1, 1, 4)])
def test_parameters_are_right_and_lie_where_the_mesh_wants_them(folder, parts):
    assert len(folder.files) > 1
    spec = hf.spec(folder)
    wanted = like(spec, tiny.mesh(*parts))
    got = loading.fill(wanted, hf.pieces(folder, spec))
    whole = tiny.gathered(spec, hf.pieces(folder, spec))
    assert jax.tree.structure(got) == jax.tree.structure(whole)
    for array, struct, values in zip(*map(jax.tree.leaves, (got, wanted, whole))):
        assert array.sharding == struct.sharding and array.dtype == struct.dtype
        np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_have_the_type_of_the_spec(folder, dtype):
    spec = hf.spec(folder, param_dtype=dtype)
    got = loading.fill(like(spec, tiny.mesh(1, 2, 1)), hf.pieces(folder, spec))
    whole = tiny.gathered(spec, hf.pieces(folder, spec))
    for array, values in zip(jax.tree.leaves(got), jax.tree.leaves(whole)):
        assert array.dtype == values.dtype == dtype
        np.testing.assert_array_equal(array, values)


def test_each_device_is_sent_the_slice_that_it_will_hold_and_no_more(folder):
    spec, mesh = hf.spec(folder), tiny.mesh(1, 2, 2)
    placed = like(spec, mesh)["blocks"]["attention"]
    for leaf in ("query", "out", "norm"):
        path = ("blocks", "attention", leaf)
        piece = next(p for p in hf.pieces(folder, spec) if p.tensor.path == path)
        part = loading._to_devices(piece, placed[leaf].sharding)
        places = placed[leaf].sharding.devices_indices_map(placed[leaf].shape)
        for shard in part.addressable_shards:
            own = places[shard.device][1:]
            assert shard.index == tuple(own[axis] for axis in piece.tensor.order)
            np.testing.assert_array_equal(shard.data, piece.values[shard.index])


# ----------------------------------------------------------------------------------------- memory


PROBE = """
import gc, json, pathlib, sys
import jax
from dapo_jax import config
from dapo_jax.models import hf, transformer
from dapo_jax.runtime import loading, mesh as mesh_lib

def resident(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

def like(spec):
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    return mesh_lib.structs(shapes, mesh_lib.param_shardings(mesh, spec))

mesh = mesh_lib.make(config.Mesh(fsdp=2))
small = hf.open(pathlib.Path(sys.argv[2]))
loading.fill(like(hf.spec(small)), hf.pieces(small, hf.spec(small)))  # libraries, compiler
folder = hf.open(pathlib.Path(sys.argv[1]))
spec = hf.spec(folder)
wanted = like(spec)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again
before = resident("VmRSS")
params = loading.fill(wanted, hf.pieces(folder, spec))
held = sum(s.data.nbytes for a in jax.tree.leaves(params) for s in a.addressable_shards)
print(json.dumps({"peak": resident("VmHWM") - before, "held": held}))
"""


def generate(folder, spec, files):
    """A bfloat16 folder of several files, its values of no interest."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config.write(spec, dtype="bfloat16")))
    tensors = families.tensors(spec, "hf")
    names = sorted(tensors, key=lambda n: (tensors[n].layer or 0, n))
    places, size = {}, -(-len(names) // files)
    for part in range(files):
        chosen, name = names[part * size:(part + 1) * size], f"model-{part}.safetensors"
        safetensors_file.write(
            folder / name, {n: tensors[n].file_shape for n in chosen},
            (np.full(tensors[n].file_shape, 0.5, np.float32) for n in chosen),
            dtype=safetensors_file.BFLOAT16, metadata={"format": "pt"})
        places |= dict.fromkeys(chosen, name)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": places}))
    return max(path.stat().st_size for path in folder.glob("*.safetensors")), max(
        4 * np.prod(tensor.shape) for tensor in tensors.values())


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_host_holds_at_most_one_file_and_one_tensor_beside_the_parameters(tmp_path):
    """300 MB in six files into float32 parameters on two devices, whose memory is the host's."""
    shape = {"vocab": 24576, "d_model": 1024, "heads": 16, "kv_heads": 8, "head_size": 64,
             "ff": 4096, "family": "qwen3", "qk_norm": True, "tied": True}
    spec = specs.ModelSpec(layers=8, **shape)
    file, tensor = generate(tmp_path / "large", spec, files=6)
    generate(tmp_path / "small", specs.ModelSpec(layers=2, **shape | {"vocab": 256}), files=1)
    assert 280e6 < sum(p.stat().st_size for p in (tmp_path / "large").iterdir()) < 340e6
    result = subprocess.run(
        [sys.executable, "-c", PROBE, tmp_path / "large", tmp_path / "small"],
        capture_output=True, text=True, check=True, cwd=hf_models.ROOT)
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["held"] >= 600e6 - 64e6
    beside = found["peak"] - found["held"]
    print(f"parameters {found['held'] / 1e6:.0f} MB, beside them {beside / 1e6:.0f} MB; "
          f"largest file {file / 1e6:.0f} MB, largest tensor {tensor / 1e6:.0f} MB")
    assert beside < file + tensor
