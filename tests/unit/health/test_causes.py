from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_runtime.contract import Cause
from dsv4_runtime.health import causes
from dsv4_runtime.health.causes import Killers


@pytest.fixture(autouse=True)
def _a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "oom_kills", lambda: 3)
    monkeypatch.setattr(causes, "shm_free", lambda: 2**30)


def test_nothing_that_explains_it(tmp_path: Path) -> None:
    assert Killers(tmp_path).who() is None


def test_rays_memory_monitor_says_so_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "raylet.out"
    log.write_text("[2026] (raylet) Ray killed 1 worker(s) based on the killing policy\n")
    killers = Killers(tmp_path)
    killers.forget()
    assert killers.who() is None, "that was an engine before"
    with log.open("a") as file:
        file.write("[2026] (raylet) Ray killed 1 worker(s) based on the killing policy\n")
    found = killers.who()
    assert found is not None
    assert found[0] is Cause.RAY_MEMORY_KILL
    killers.close()


def test_the_kernels_counter_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killers = Killers(tmp_path)
    monkeypatch.setattr(causes, "oom_kills", lambda: 4)
    found = killers.who()
    assert found is not None
    assert found[0] is Cause.OUT_OF_MEMORY_HOST
    assert killers.who() is None, "one kill explains one end"
    monkeypatch.setattr(causes, "oom_kills", lambda: None)
    assert killers.who() is None


def test_a_full_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killers = Killers(tmp_path)
    monkeypatch.setattr(causes, "shm_free", lambda: 4096)
    assert killers.who() == (Cause.SHARED_MEMORY_FULL, "shared memory (/dev/shm) has 4096 bytes free")
