import numpy as np

from dapo_jax import types
from dapo_jax.runtime import failed_updates


def test_every_field_of_every_microbatch_is_kept_under_its_number_and_name(tmp_path):
    batches = [types.TrainBatch(*(np.full((2, 2), 10 * i + j, np.float32) for j in range(7)),
                                old=np.full((2, 2), np.nan) if i else None) for i in range(2)]
    path = failed_updates.write(tmp_path, batches, step=7, number=0)
    assert path == tmp_path / "failed_updates" / "step_000007_update_1.npz"
    with np.load(path) as kept:
        assert (kept["0.tokens"] == 2).all() and (kept["1.tokens"] == 12).all()
        assert np.isnan(kept["1.old"]).all() and "0.old" not in kept and "0.reference" not in kept
        assert len(kept.files) == 15
