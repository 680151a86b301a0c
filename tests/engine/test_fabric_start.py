"""A group without configured interfaces: its members detect them and test the paths; Ray and vLLM start with them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_two_members_start_with_the_fabric_that_they_find() -> None:
    # A short path, for Ray's sockets.
    root = Path(tempfile.mkdtemp(prefix="d4-"))
    try:
        command = [sys.executable, str(Path(__file__).with_name("fabric_start.py")), str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        if done.stderr.startswith("not here"):
            pytest.skip(done.stderr)
        logs = "\n".join(log.read_text(errors="replace")[-2000:] for log in root.glob("nano/i1/m*/agent.log"))
        assert done.returncode == 0, f"{done.stderr[-2000:]}\n{logs}"
    finally:
        shutil.rmtree(root, ignore_errors=True)
    found = json.loads(done.stdout)
    assert found["tokens"] == 4
    expected = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0", "TP_SOCKET_IFNAME": "eth0"}
    for member in found["members"]:
        assert member["fabric"]["proved"]
        assert "bandwidth: skipped, no GPU" in member["fabric"]["notes"]
        # The environment that the agent gave to Ray; in /proc, the titles of Ray's own processes overwrite it.
        assert member["told"]["ray"] == expected | {"NCCL_IB_DISABLE": "1"}, member["told"]
