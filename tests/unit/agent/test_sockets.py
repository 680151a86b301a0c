"""Sockets of a killed engine lie in the member's directory and are removed."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_runtime.agent.cleanup import sweep_sockets
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import GroupPlan

MakePlan = Callable[..., GroupPlan]
# Steps of vLLM for each of its queues (`utils/network_utils.py:get_open_zmq_ipc_path`), followed by SIGKILL.
ENGINE = """
import os, signal, socket, tempfile, uuid
bound = socket.socket(socket.AF_UNIX)
bound.bind(f"{tempfile.gettempdir()}/{uuid.uuid4()}")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_sockets_without_a_listener_are_removed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as used, socket.socket(socket.AF_UNIX) as left:
        used.bind(str(tmp_path / "used"))
        left.bind(str(tmp_path / "left"))
        left.close()
        assert sweep_sockets(tmp_path) == [tmp_path / "left"]
        assert {path.name for path in tmp_path.iterdir()} == {"file", "used"}
    assert sweep_sockets(tmp_path / "nowhere") == []


async def test_a_killed_engine_leaves_nothing_outside_its_members_directory(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # A socket's path has at most 107 bytes, of which pytest's directories use most.
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", str(elsewhere))
        member = Member(make_plan(), 0, Path(short), "token")
        child = await member.context.start_child("api", [sys.executable, "-c", ENGINE])
        assert await child.wait() == -9
        assert list(elsewhere.iterdir()) == []
        assert len(list(member.context.temporary.iterdir())) == 1
        await member.context.sweep()
        assert list(member.context.temporary.iterdir()) == []
    assert os.environ["TMPDIR"] == str(elsewhere), "the agent's own stays"


def test_vllm_creates_its_sockets_in_tmpdir(tmp_path: Path) -> None:
    """Check vLLM's derivation of the path from `TMPDIR`, to detect versions that use another location."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    # Run this module alone, because an import of the package `vllm` takes seconds.
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['__getattr__']('VLLM_RPC_BASE_PATH'))"
    env = {**os.environ, "TMPDIR": str(tmp_path), "VLLM_CONFIGURE_LOGGING": "0"}
    env.pop("VLLM_RPC_BASE_PATH", None)
    command = [sys.executable, "-c", code, str(Path(vllm.origin).with_name("envs.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(tmp_path)
    assert tempfile.gettempdir() != str(tmp_path)
