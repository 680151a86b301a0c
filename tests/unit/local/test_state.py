from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_operator.api import DSV4Deployment, load
from dsv4_operator.backends.local.state import AlreadyRunning, DeploymentState, StateError, deployments

NANO = (Path(__file__).parents[3] / "examples" / "nano.yaml").read_text()


@pytest.fixture
def root() -> Iterator[Path]:
    # Not tmp_path: a state directory must be short.
    with tempfile.TemporaryDirectory(prefix="d4-") as path:
        yield Path(path)


@pytest.fixture
def nano() -> DSV4Deployment:
    return load(NANO)


HOLD = """
import sys, time
from pathlib import Path
from dsv4_operator.backends.local.state import DeploymentState
with DeploymentState(Path(sys.argv[1]), "nano").lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_only_one_loop_at_a_time_and_the_second_learns_who_it_is(root: Path) -> None:
    state = DeploymentState(root, "nano")
    state.prepare()
    assert state.holder() is None
    with subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert state.holder() == other.pid
        with pytest.raises(AlreadyRunning, match=rf"'nano' is already running \(process {other.pid}\)"), state.lock():
            pass
        # However it ends, the lock is free again.
        other.kill()
        other.wait(10)
        assert state.holder() is None
        with state.lock():
            pass


def test_a_path_too_long_for_rays_sockets_is_refused(root: Path) -> None:
    with pytest.raises(StateError, match=r"characters too long for Ray's sockets"):
        DeploymentState(root / ("x" * 40), "nano").prepare()


def test_a_directory_that_cannot_be_made_is_named(root: Path) -> None:
    (root / "file").write_text("")
    with pytest.raises(StateError, match=r"--state-dir '.*file': Not a directory"):
        DeploymentState(root / "file", "nano").prepare()


def test_objects_come_back_as_they_were_kept(root: Path, nano: DSV4Deployment) -> None:
    state = DeploymentState(root, "nano")
    state.prepare()
    assert state.object() is None
    assert deployments(root) == []
    state.save_manifest(nano)
    state.save_object(nano)
    assert state.manifest() == state.object() == nano
    assert deployments(root) == [state]
    assert [path.name for path in state.directory.iterdir() if path.name.startswith(".")] == []
