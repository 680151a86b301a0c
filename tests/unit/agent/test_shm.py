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

        born = time.time() - 0.1
        region = "vllm_offload_5e6c7a52-0d1f-4a3c-9f59-1d2c3b4a5e6f_dp0.mmap"
        left = [leave(name) for name in ("psm_0123abcd", "12345-tp:0-[0-1]-cpushm_0", region, f"{region}.31")]
        foreign = leave("somebody-elses-data")
        mapped, opened = leave("psm_0c0ffee0"), leave("psm_0badcafe")
        with mapped.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 1)
        with memory, opened.open("rb"):
            with monkeypatch.context() as patched:
                # Files this young are kept.
                patched.setattr(cleanup, "_SETTLED_SECONDS", 600.0)
                assert sweep(born) == []
            time.sleep(cleanup._SETTLED_SECONDS + 0.2)
            # Files older than the member are kept.
            assert sweep(time.time()) == []
            assert sweep(born) == sorted(path.name for path in left)
            assert not any(path.exists() for path in left)
            assert all(path.exists() for path in (foreign, mapped, opened))
