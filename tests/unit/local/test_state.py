from __future__ import annotations

import itertools
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api import DSV4Deployment, load
from dsv4_operator.backends.local.facts import local_facts
from dsv4_operator.backends.local.state import (
    MAX_MEMBER_PATH,
    MAX_ROOT,
    AlreadyRunning,
    DeploymentState,
    StateError,
    deployments,
)
from dsv4_operator.cli import processes
from dsv4_operator.planning import plan_group
from dsv4_operator.planning.catalog import GIB
from dsv4_runtime.agent.ray import link_ray_root
from dsv4_runtime.contract.plan import LONGEST_RAY_ROOT
from dsv4_testkit.errors import raises_naming

NANO = (Path(__file__).parents[3] / "examples" / "nano.yaml").read_text()


@pytest.fixture
def root() -> Iterator[Path]:
    # tmp_path is not usable: a state directory must be short.
    with tempfile.TemporaryDirectory(prefix="d4-") as path:
        yield Path(path)


@pytest.fixture
def nano() -> DSV4Deployment:
    return load(NANO)


HOLD = """
import sys, time
from pathlib import Path
from dsv4_operator.backends.local.facts import local_facts
from dsv4_operator.backends.local.state import DeploymentState
with DeploymentState(Path(sys.argv[1]), "nano").lock():
    print("held", flush=True)
    time.sleep(600)
"""


def test_files_of_a_deployment_are_private(root: Path, nano: DSV4Deployment) -> None:
    """Independent of the umask: files of the state, of the loop itself, and of processes that it starts."""
    before = os.umask(0)
    try:
        state = DeploymentState(root, "nano")
        state.directory.mkdir()
        state.prepare()
        state.save_manifest(nano)
        state.save_object(nano)
        write = "import subprocess; open('own', 'w'); subprocess.run(['touch', 'childs'], check=True); print('said')"
        assert processes.start_loop(state, [sys.executable, "-c", write]).wait(30) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(state.directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in state.directory.iterdir()}
    assert modes == dict.fromkeys(("manifest.json", "object.json", "loop.log", "own", "childs"), 0o600)


def test_a_second_loop_is_refused_with_the_process_of_the_first(root: Path) -> None:
    state = DeploymentState(root, "nano")
    state.prepare()
    assert state.holder() is None
    with subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert state.holder() == other.pid
        with raises_naming(AlreadyRunning, "'nano'", f"process {other.pid})"), state.lock():
            pass
        # The lock is free again however the process ends.
        other.kill()
        other.wait(60)
        assert state.holder() is None
        with state.lock():
            pass


def test_a_path_too_long_for_sockets_is_refused(root: Path) -> None:
    with pytest.raises(StateError, match=r"characters too long for sockets of Ray and vLLM"):
        DeploymentState(root / ("x" * 40), "nano").prepare()


@given(user=st.integers(1, 15), name=st.integers(1, 40), group=st.sampled_from([0, 7]), rank=st.integers(0, 9))
def test_every_accepted_path_has_room_for_rays_sockets(user: int, name: int, group: int, rank: int) -> None:
    """Ray's directory is short, or a link that the agent creates; both lead to the same session."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as parent:
        root = Path(parent) / ("u" * user)
        state = DeploymentState(root, "n" * name)
        longest = len(str(state.member(999, 99, group)))
        if longest > MAX_MEMBER_PATH or (longest + len("/ray") > LONGEST_RAY_ROOT and len(str(root)) > MAX_ROOT):
            with pytest.raises(StateError, match="too long"):
                state.prepare(group + 1)
            return
        state.prepare(group + 1)
        facts = local_facts(load(NANO), state, memory=64 * GIB).in_incarnation(group, 3)
        ray = Path(facts.ray_root(3, rank))
        session = ray / "session_2026-11-27_02-34-03_912710_4194304" / "sockets"
        own = state.member(3, rank, group) / "ray"
        own.parent.mkdir(parents=True)
        for _ in range(2):
            link_ray_root([f"--temp-dir={ray}"], own)
        session.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(session / "dash_MetricsHead"))
        assert (own / session.relative_to(ray) / "dash_MetricsHead").is_socket()


def test_links_of_members_that_are_gone_are_removed(root: Path) -> None:
    links, own = root / ".r", root / "nano" / "i2" / "m0" / "ray"
    links.mkdir()
    own.parent.mkdir(parents=True)
    (links / "abcdef").symlink_to(root / "nano" / "i1" / "m0" / "ray")
    link_ray_root([f"--temp-dir={links / '123456'}"], own)
    assert {path.name: path.resolve() for path in links.iterdir()} == {"123456": own}


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


def test_groups_have_directories_of_their_own(root: Path) -> None:
    state = DeploymentState(root, "nano")
    state.prepare(2)
    assert state.groups() == [0, 1]
    for group in (0, 1):
        state.member(1, 0, group).mkdir(parents=True)
        state.member(2, 0, group).mkdir(parents=True)
        state.evidence(group).mkdir()
    state.forget_incarnation(1, 1)
    assert (state.incarnations(0), state.incarnations(1)) == ([1, 2], [2])
    state.forget_incarnations()
    assert (state.incarnations(0), state.incarnations(1)) == ([], [])
    assert state.evidence(0) != state.evidence(1)
    assert state.evidence(1).is_dir()


def test_the_longest_path_is_that_of_the_last_group(root: Path) -> None:
    name = "n" * (MAX_MEMBER_PATH - len(f"{root}//i999/m99"))
    DeploymentState(root, name).prepare()
    with pytest.raises(StateError, match="3 characters too long"):
        DeploymentState(root, name).prepare(2)


def test_two_groups_share_the_machine_and_nothing_else(root: Path, nano: DSV4Deployment) -> None:
    asked = nano.model_copy(update={"spec": nano.spec.model_copy(update={"replicas": 2})})
    state = DeploymentState(root, "nano")
    one, two = local_facts(nano, state, memory=64 * GIB), local_facts(asked, state, memory=64 * GIB)
    # Each member's share corresponds to the number of members.
    assert [node.memory_bytes for node in two.nodes] == [node.memory_bytes // 2 for node in (*one.nodes, *one.nodes)]
    plans = [plan_group(asked, two, group=group, incarnation=3) for group in (0, 1)]
    members = [member for plan in plans for member in plan.members]
    assert [member.node for member in members] == ["local-0", "local-1", "local-2", "local-3"]
    assert len({member.address for member in members}) == 4
    places = [next(arg for arg in member.ray_args if arg.startswith("--temp-dir")) for member in members]
    assert places == [
        f"--temp-dir={state.member(3, member.rank, plan.group)}/ray" for plan in plans for member in plan.members
    ]
    assert len(set(places)) == 4
    assert plans[0].weights == plans[1].weights


@given(
    st.one_of(
        st.text(max_size=12),
        st.from_regex("[a-z][a-z0-9-]*", fullmatch=True),
        st.sampled_from(["weights", "secrets", "..", ".", "", "a/b", "weights/x", "Weights"]),
    )
)
def test_a_deployments_directory_has_nothing_of_others(name: str) -> None:
    root = Path("/state")
    try:
        state = DeploymentState(root, name)
    except StateError:
        return
    assert state.directory.parent == root
    assert state.directory.resolve() == state.directory
    assert state.directory not in (state.weights, state.secrets)


@pytest.mark.parametrize("name", ["weights", "secrets"])
def test_directories_that_all_share_are_no_deployments_directories(root: Path, nano: DSV4Deployment, name: str) -> None:
    with pytest.raises(StateError, match=rf"metadata\.name: '{name}' is a directory of .* that all deployments share"):
        DeploymentState(root, name)
    # State of an earlier version.
    (root / name).mkdir()
    (root / name / "manifest.json").write_text(nano.to_json())
    assert deployments(root) == []


def test_only_a_directory_with_its_own_manifest_is_purged(root: Path, nano: DSV4Deployment) -> None:
    state = DeploymentState(root, "nano")
    state.prepare()
    other = nano.model_copy(update={"metadata": nano.metadata.model_copy(update={"name": "other"})})
    manifest = state.directory / "manifest.json"
    for text in (None, "", "[]", '{"metadata": null}', "\xff", other.to_json()):
        if text is not None:
            manifest.write_text(text, encoding="latin-1")
        with pytest.raises(
            StateError, match=r"is not removed, because its manifest\.json is not of a deployment 'nano'"
        ):
            state.purge()
        assert state.directory.exists()
    state.save_manifest(nano)
    state.purge()
    assert not state.directory.exists()
    assert state.weights.exists()


class Killed(BaseException):
    """The end of a process."""


def killed_after(real: Callable[..., None], left: Iterator[int]) -> Callable[..., None]:
    def remove(*arguments: Any, **options: Any) -> None:
        if next(left) == 0:
            raise Killed
        real(*arguments, **options)

    return remove


def test_a_purge_that_was_killed_can_be_repeated(
    root: Path, nano: DSV4Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = DeploymentState(root, "nano")
    for removals in itertools.count():
        state.prepare(groups=2)
        state.save_manifest(nano)
        state.save_object(nano)
        (state.evidence() / "1").mkdir(parents=True)
        (state.evidence() / "1" / "vllm.log").touch()
        (state.directory / "link").symlink_to(state.weights)
        left = itertools.count(removals, -1)
        try:
            with monkeypatch.context() as patch, state.lock():
                for name in ("unlink", "rmdir"):
                    patch.setattr(os, name, killed_after(getattr(os, name), left))
                state.purge()
        except Killed:
            if any(state.directory.iterdir()):
                assert deployments(root) == [state]
                state.purge()
            else:
                state.directory.rmdir()
        else:
            break
    assert removals > 5
    assert not state.directory.exists()
    assert state.weights.exists()
