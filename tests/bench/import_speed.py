"""How long a folder of 1 GB takes into sharded parameters, beside numpy doing the same on the host.

usage: python tests/bench/import_speed.py [FOLDER] [--devices=4]

FOLDER is made if it is not there (random bfloat16 in four files). Both sides read, cast to float32
and stack every layer into one array in the decoder's layout; they take turns, and the medians of
five turns are compared. Pages of the files are in memory from the first turn on, for both.
"""

import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time

COUNT = next((a.partition("=")[2] for a in sys.argv if a.startswith("--devices=")), "4")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={COUNT}"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax  # noqa: E402
import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402

from dapo_jax import config  # noqa: E402
from dapo_jax.models import families, hf, hf_config, safetensors_file, transformer  # noqa: E402
from dapo_jax.models import spec as specs  # noqa: E402
from dapo_jax.runtime import loading  # noqa: E402
from dapo_jax.runtime import mesh as mesh_lib  # noqa: E402

SPEC = specs.ModelSpec(vocab=32768, layers=16, d_model=1536, heads=12, kv_heads=4, head_size=128,
                       ff=4608, family="qwen3", qk_norm=True, tied=True)
FILES, TURNS = 4, 5


def generate(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config.write(SPEC, dtype="bfloat16")))
    tensors = families.tensors(SPEC, "hf")
    names = sorted(tensors, key=lambda n: (tensors[n].layer or 0, n))
    rng, places, size = np.random.default_rng(0), {}, -(-len(names) // FILES)
    for part in range(FILES):
        chosen, name = names[part * size:(part + 1) * size], f"model-{part}.safetensors"
        values = (rng.standard_normal(tensors[n].file_shape, np.float32) for n in chosen)
        safetensors_file.write(folder / name, {n: tensors[n].file_shape for n in chosen}, values,
                               dtype=safetensors_file.BFLOAT16, metadata={"format": "pt"})
        places |= dict.fromkeys(chosen, name)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": places}))


def by_numpy(folder, shapes):
    """Read, cast and stack on the host; numpy casts while it copies, its fastest way."""
    arrays = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    wanted = families.tensors(SPEC, "hf")
    for file in sorted(folder.glob("*.safetensors")):
        for name, values in safetensors.numpy.load_file(file).items():
            tensor = wanted[name]
            part = arrays[tensor.path]
            part = part if tensor.layer is None else part[tensor.layer]
            part[...] = tensor.arrange(values)
    return arrays


def by_loader(folder, mesh):
    """As setup.initial_params does, opening and checking the folder included."""
    source = hf.open(folder)
    spec = hf.spec(source)
    made = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    like = mesh_lib.structs(made, mesh_lib.param_shardings(mesh, spec))
    return jax.block_until_ready(loading.fill(like, hf.pieces(source, spec)))


def main():
    given = [a for a in sys.argv[1:] if not a.startswith("--")]
    folder = pathlib.Path(given[0] if given else tempfile.mkdtemp()) / "model"
    if not folder.exists():
        generate(folder)
    made = jax.eval_shape(lambda: transformer.init(SPEC, jax.random.key(0)))
    shapes = {tuple(k.key for k in path): leaf.shape
              for path, leaf in jax.tree_util.tree_leaves_with_path(made)}
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    split = {"1": (1, 1), "2": (2, 1)}.get(COUNT, (int(COUNT) // 2, 2))
    mesh = mesh_lib.make(config.Mesh(data=1, fsdp=split[0], tensor=split[1]))
    print(f"{size / 1e9:.2f} GB, {sum(map(math.prod, shapes.values())) / 1e6:.0f} M parameters, "
          f"mesh fsdp {split[0]} x tensor {split[1]}")
    turns, used = {"numpy": [], "loader": []}, {"numpy": [], "loader": []}
    for _ in range(TURNS):
        # The first turn of the loader compiles, as every start does; so do all, hence the clearing.
        jax.clear_caches()
        loading._writer.cache_clear()
        loading._placer.cache_clear()
        for name, work in (("numpy", lambda: by_numpy(folder, shapes)),
                           ("loader", lambda: by_loader(folder, mesh))):
            start, busy = time.perf_counter(), time.process_time()
            result = work()
            turns[name].append(time.perf_counter() - start)
            used[name].append(time.process_time() - busy)
            del result
    for name, seconds in turns.items():
        print(f"{name:7} {statistics.median(seconds):6.2f} s   "
              f"({', '.join(f'{s:.2f}' for s in seconds)}), processors busy "
              f"{statistics.median(used[name]):.2f} s")
    ratio = statistics.median(turns["loader"]) / statistics.median(turns["numpy"])
    print(f"loader / numpy = {ratio:.2f}")


if __name__ == "__main__":
    main()
