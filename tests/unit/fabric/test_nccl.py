"""Log lines of NCCL: complete logs of NCCL 2.28.9 with two GPUs in `logs/`, single lines of other versions here.

The logs: over NVLink, over sockets, and with RDMA required where there is none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_runtime.contract import Cause
from dsv4_runtime.engine.logs import fatal
from dsv4_runtime.fabric import probes
from dsv4_runtime.fabric.member import NcclLog

LOGS = Path(__file__).parent / "logs"


def read(text: str) -> NcclLog:
    log = NcclLog()
    for line in text.splitlines():
        log.feed(line)
    return log


def test_sockets() -> None:
    text = (LOGS / "nccl-2.28.9-socket.log").read_text()
    log = read(text)
    assert (log.version, log.network, log.transport, log.no_device) == ("2.28.9", "Socket", "Socket", True)
    assert log.connections == {"Socket": 4}
    assert log.first_socket is not None
    assert "Assigned NET plugin Socket to comm" in log.first_socket
    found = probes.parse_bandwidth(text)
    assert found is not None
    assert found.bandwidth == pytest.approx(3.628e9, rel=1e-3)


def test_nvlink_makes_no_connection_over_a_network() -> None:
    log = read((LOGS / "nccl-2.28.9-p2p.log").read_text())
    assert not log.connections
    # The network that NCCL would use between machines.
    assert log.network == "Socket"


def test_required_rdma_without_a_device_is_recognised() -> None:
    text = (LOGS / "nccl-2.28.9-ibrequired.log").read_text()
    log = read(text)
    assert (log.no_device, log.devices, log.network, log.first_socket) == (True, (), None, None)
    assert probes.parse_bandwidth(text) is None


@pytest.mark.parametrize(
    ("lines", "transport", "devices", "sockets"),
    [
        (
            [
                "spark-1:7:19 [0] NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE [1]roceP2p1s0f0:1/RoCE [RO]; "
                "OOB enp1s0f0np0:192.168.100.1<0>",
                "spark-1:7:19 [0] NCCL INFO Using network IB",
                "spark-1:7:19 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0",
            ],
            "IB",
            ("rocep1s0f0:1", "roceP2p1s0f0:1"),
            False,
        ),
        (  # behind Ray; two ports merged into one
            [
                "(RayWorkerProc pid=7, ip=10.0.0.2) a:7:9 [0] NCCL INFO NET/IB : Using [0]={[0] rocep130s0:1/RoCE, [1] "
                "rocep130s0:2/RoCE}",
                "(RayWorkerProc pid=7, ip=10.0.0.2) a:7:9 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via "
                "NET/IB/0/GDRDMA",
            ],
            "IB",
            ("rocep130s0:1", "rocep130s0:2"),
            False,
        ),
        (  # 2.4
            [
                "m:22:295 [2] NCCL INFO NET/Socket : Using [0]ib0:192.168.11.1<0>",
                "m:20:289 NCCL version 2.4.7+cuda10.0",
            ],
            None,
            (),
            False,
        ),
        (  # a plugin
            [
                "n:1:2 [0] NCCL INFO Assigned NET plugin Libfabric to comm",
                "n:1:2 [0] NCCL INFO Using network Libfabric",
            ],
            "Libfabric",
            (),
            False,
        ),
        (  # an initialized plugin is not the one in use
            [
                "n:1:2 [0] NCCL INFO Initialized NET plugin Socket",
                "n:1:2 [0] NCCL INFO Assigned NET plugin IB to comm",
            ],
            "IB",
            (),
            False,
        ),
        (  # most over RDMA, one connection over sockets
            [
                "n:1:2 [0] NCCL INFO Using network IB",
                "n:1:2 [0] NCCL INFO Channel 02/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
            ],
            "Socket",
            (),
            True,
        ),
        (["INFO 11-21 loading NET/Socket of the model", "Using network Socket", ""], None, (), False),
    ],
)
def test_lines_of_other_versions(
    lines: list[str], transport: str | None, devices: tuple[str, ...], sockets: bool
) -> None:
    log = read("\n".join(lines))
    assert (log.transport, log.devices, log.first_socket is not None) == (transport, devices, sockets)


def test_the_bandwidth_probe_where_no_gpu_is() -> None:
    import subprocess

    command = probes.bandwidth_command(0, 2, "127.0.0.1", 1, 5)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = probes.parse_bandwidth(done.stdout)
    assert found is not None
    import torch

    if not torch.cuda.is_available():
        assert found == probes.BandwidthResult(None, "no GPU")


@pytest.mark.parametrize("text", ["", "dsv4 fabric bandwidth: {", "dsv4 fabric bandwidth: []", "something else"])
def test_a_probe_that_printed_nothing_of_use(text: str) -> None:
    assert probes.parse_bandwidth(text) is None


def test_bus_bandwidth_as_nccl_tests_count_it() -> None:
    assert probes.bus_bandwidth(100, 2, 1.0) == 100
    assert probes.bus_bandwidth(100, 4, 0.5) == 300


@pytest.mark.parametrize(
    "line",
    [
        "[rank1]:[E1121 10:00:00 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1) ran for 600000 milliseconds before timing out.",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
)
def test_a_collective_that_never_ended_has_a_cause(line: str) -> None:
    found = fatal(line)
    assert found is not None
    assert found[1] is Cause.NCCL_TIMEOUT


def test_nccl_s_own_lines_about_its_start_are_no_deaths() -> None:
    for name in ("socket", "p2p"):
        lines = (LOGS / f"nccl-2.28.9-{name}.log").read_text().splitlines()
        assert [line for line in lines if "NCCL" in line and fatal(line)] == []
