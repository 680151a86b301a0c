from __future__ import annotations

import mmap
import tempfile
import time
from pathlib import Path

import pytest

from dsv4_runtime.agent import cleanup
from dsv4_runtime.agent.cleanup import sweep


def test_only_abandoned_shared_memory_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A directory of its own: members of other tests, and of engines on this machine, remove such files too.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shm = Path(folder)
        monkeypatch.setattr(cleanup, "SHM", shm)

        def leave(name: str) -> Path:
            """Create a file as a killed engine leaves it."""
            (shm / name).write_bytes(b"x")
            return shm / name


def test_only_abandoned_shared_memory_is_removed() -> None:
    born = time.time() - 0.1
    region = "vllm_offload_5e6c7a52-0d1f-4a3c-9f59-1d2c3b4a5e6f_dp0.mmap"
    left = [leave(name) for name in ("psm_0123abcd", "12345-tp:0-[0-1]-cpushm_0", region, f"{region}.31")]
    foreign = leave("somebody-elses-data")
    used = shared_memory.SharedMemory(create=True, size=16)
    opened = leave("psm_0badcafe")
    descriptor = os.open(opened, os.O_RDONLY)
    try:
        # Files this young are kept.
        assert sweep(born) == []
        time.sleep(2.2)
        # Files older than the member are kept.
        assert sweep(time.time()) == []
        assert sweep(born) == sorted(path.name for path in left)
        assert not any(path.exists() for path in left)
        assert foreign.exists()
        assert opened.exists()
        assert (SHM / used.name).exists()
    finally:
        os.close(descriptor)
        used.close()
        used.unlink()
        for path in (*left, foreign, opened):
            path.unlink(missing_ok=True)
