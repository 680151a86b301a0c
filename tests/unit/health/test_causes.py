from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsv4_runtime.agent.decide.death import with_log_evidence
from dsv4_runtime.contract import Cause, Failure
from dsv4_runtime.health import vitals
from dsv4_runtime.health.vitals import ExitCauses


@pytest.fixture(autouse=True)
def _a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "oom_kills", lambda: 3)
    monkeypatch.setattr(vitals, "shm_free", lambda: 2**30)


def test_nothing_that_explains_it(tmp_path: Path) -> None:
    assert ExitCauses(tmp_path).explain() is None


def test_kills_by_rays_memory_monitor_are_read_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "raylet.out"
    log.write_text("[2026] (raylet) Ray killed 1 worker(s) based on the killing policy\n")
    exit_causes = ExitCauses(tmp_path)
    exit_causes.forget()
    assert exit_causes.explain() is None, "that was an engine before"
    with log.open("a") as file:
        file.write("[2026] (raylet) Ray killed 1 worker(s) based on the killing policy\n")
    found = exit_causes.explain()
    assert found is not None
    assert found[0] is Cause.RAY_MEMORY_KILL
    exit_causes.close()


def test_the_kernels_counter_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exit_causes = ExitCauses(tmp_path)
    monkeypatch.setattr(vitals, "oom_kills", lambda: 4)
    found = exit_causes.explain()
    assert found is not None
    assert found[0] is Cause.OUT_OF_MEMORY_HOST
    assert exit_causes.explain() is None, "one kill explains one end"
    monkeypatch.setattr(vitals, "oom_kills", lambda: None)
    assert exit_causes.explain() is None


def test_a_full_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exit_causes = ExitCauses(tmp_path)
    monkeypatch.setattr(vitals, "shm_free", lambda: 4096)
    assert exit_causes.explain() == (Cause.SHARED_MEMORY_FULL, "shared memory (/dev/shm) has 4096 bytes free")


def says(worker: str, kind: int) -> str:
    return (
        "[2026-11-23 07:36:30,271 I 23 23] (raylet) node_manager.cc:1477: Disconnecting worker, graceful=false,"
        f" disconnect_type={kind}, has_creation_task_exception=false worker_id={worker} job_id=03000000\n"
    )


def test_the_raylets_log_identifies_workers_that_were_ordered_to_end(tmp_path: Path) -> None:
    for worker, pid in (("e79a", 332), ("aab1", 226), ("cf19", 32)):
        (tmp_path / f"python-core-worker-{worker}_{pid}.log").write_text("Actor creation task finished\n")
    exit_causes = ExitCauses(tmp_path)
    assert exit_causes.ordered_to_end(332) is None, "there is no raylet's log yet"
    about_itself = 10_000 * "[state-dump] \tNodeManager - 1 total\n"
    (tmp_path / "raylet.out").write_text(about_itself + says("e79a", 1) + 1000 * "[state-dump]\n" + says("aab1", 0))
    assert exit_causes.ordered_to_end(332)
    assert exit_causes.ordered_to_end(226) is False, "that one ended by itself"
    assert exit_causes.ordered_to_end(32) is False, "nobody says that this one left"
    assert exit_causes.ordered_to_end(465) is None, "nobody knows this one"


def test_a_process_id_that_was_an_earlier_workers(tmp_path: Path) -> None:
    old, new = (tmp_path / f"python-core-worker-{worker}_226.log" for worker in ("ff", "aa"))
    old.touch()
    os.utime(old, (1, 1))
    new.touch()
    (tmp_path / "raylet.out").write_text(says("ff", 1))
    assert ExitCauses(tmp_path).ordered_to_end(226) is False


@pytest.mark.parametrize(
    ("cause", "said", "expected"),
    [
        (Cause.ENGINE_CORE_DIED, ("CUDA out of memory", Cause.OUT_OF_MEMORY_GPU), Cause.OUT_OF_MEMORY_GPU),
        (Cause.RAY_WORKER_DIED, ("CUDA out of memory", Cause.OUT_OF_MEMORY_GPU), Cause.OUT_OF_MEMORY_GPU),
        (Cause.ENGINE_CORE_DIED, ("larger than the available", Cause.KV_CACHE_TOO_SMALL), Cause.KV_CACHE_TOO_SMALL),
        (Cause.API_SERVER_DIED, ("no kernel image", Cause.KERNEL_MISSING), Cause.KERNEL_MISSING),
        (Cause.ENGINE_CORE_DIED, ("NCCL WARN Call to ibv_modify_qp failed", Cause.FABRIC_ERROR), Cause.FABRIC_ERROR),
        # Consequences of another death, and a cause that is only proved by reading the files.
        (Cause.RAY_WORKER_DIED, ("Watchdog caught", Cause.NCCL_TIMEOUT), Cause.RAY_WORKER_DIED),
        (Cause.ENGINE_CORE_DIED, ("SafetensorError", Cause.WEIGHTS_CORRUPT), Cause.ENGINE_CORE_DIED),
        (Cause.ENGINE_CORE_DIED, ("ValueError: an assertion", None), Cause.ENGINE_CORE_DIED),
        (Cause.ENGINE_CORE_DIED, None, Cause.ENGINE_CORE_DIED),
        # A cause that is certain for another reason remains.
        (Cause.XID_ERROR, ("CUDA out of memory", Cause.OUT_OF_MEMORY_GPU), Cause.XID_ERROR),
    ],
)
def test_a_cause_that_the_log_proves_outranks_the_order_of_deaths(
    cause: Cause, said: tuple[str, Cause | None] | None, expected: Cause
) -> None:
    failure = Failure(time=1.0, cause=cause, message="it ended", detected_by="process")
    assert with_log_evidence(failure, said).cause is expected
