import jax
import pytest

from dapo_jax.runtime import checkpoint_files


def test_a_process_whose_save_failed_waits_for_no_other(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(checkpoint_files.ocp.multihost, "get_barrier_sync_fn",
                        lambda: lambda **given: waited.append(given))
    checkpoint_files.barrier(key="all is well", timeout_ms=5)
    with pytest.raises(OSError, match="No space left"):
        try:
            raise OSError("No space left on device")
        finally:
            checkpoint_files.barrier(key="on the way out", timeout_ms=5)
    assert waited == [{"key": "all is well", "timeout_ms": 5}]
