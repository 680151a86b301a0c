from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dsv4_runtime.agent import http
from dsv4_runtime.agent.decide.events import Peer
from dsv4_runtime.agent.record import MemberRecord
from dsv4_runtime.client import AgentClient
from dsv4_runtime.contract import (
    AgentStatus,
    Cause,
    FabricStatus,
    Failure,
    GpuSignals,
    GroupReport,
    Health,
    KernelStatus,
    Phase,
    Progress,
    ProviderStatus,
    Rail,
    Signals,
    Verdict,
)
from dsv4_runtime.contract.token import new_key, new_token
from dsv4_testkit.reporter import Reporter


@pytest.fixture
async def served(make_plan: Any) -> Any:
    reporter = Reporter(make_plan())
    runner = web.AppRunner(http.application(reporter, "secret"))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session, reporter
    await runner.cleanup()


STRANGERS = ("", "Bearer wrong", "secret", "Bearer ", "Bearer s", "Bearer secre", "Bearer secrets", "bearer secret")


@pytest.mark.parametrize("header", [{"Authorization": given} if given else {} for given in STRANGERS])
@pytest.mark.parametrize("path", ["/v1/status", "/v1/watch", "/v1/evidence"])
async def test_requests_without_the_token_are_refused(served: Any, header: dict[str, str], path: str) -> None:
    session, _ = served
    async with session.get(path, headers=header) as response:
        assert response.status == 401


@pytest.mark.parametrize("given", [b"Bearer \xff\xfe", b"Bearer secret\xff", b"\xc3\x28", b"Bearer \xf0\x9f\x92\xa9"])
async def test_a_token_of_any_bytes_is_refused(served: Any, given: bytes) -> None:
    session, _ = served
    reader, writer = await asyncio.open_connection(session._base_url.host, session._base_url.port)
    writer.write(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + given + b"\r\n\r\n")
    async with asyncio.timeout(60):
        assert (await reader.readline()).split()[1] == b"401"
    writer.close()


async def test_a_new_incarnation_is_opened_by_the_key_and_not_by_the_token_before(make_plan: Any) -> None:
    key, client = new_key(), AgentClient()
    runners, answers = [], []
    port = 0
    for _ in range(2):
        runners.append(web.AppRunner(http.application(Reporter(make_plan()), new_token(key)), shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", port).start()
        port = runners[-1].addresses[0][1]
        url = f"http://127.0.0.1:{port}"
        before = client._credentials[url].token if answers else "none"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {before}"}) as session:
            assert (await session.get(f"{url}/v1/status")).status == 401
        # The client first presents the token of the previous incarnation, at the same address.
        answers.append(await client.status(url, key))
        assert await client.status(url, new_key()), "what is known needs no key"
        stranger = AgentClient()
        with pytest.raises(aiohttp.ClientResponseError, match="401"):
            await stranger.status(url, new_key())
        await stranger.close()
        await runners[-1].cleanup()
    assert len(answers) == 2
    await client.close()


async def test_status_round_trips(served: Any) -> None:
    session, reporter = served
    async with session.get("/v1/status", headers={"Authorization": "Bearer secret"}) as response:
        status = AgentStatus.model_validate_json(await response.read())
    assert status.phase is Phase.PREFLIGHT
    assert status.engine is not None
    assert status.model_copy(update={"time": 0.0}) == reporter.status().model_copy(update={"time": 0.0})


async def test_ready_means_serving_and_alive_means_answering(served: Any) -> None:
    session, reporter = served
    for phase, ready in ((Phase.LOADING, 503), (Phase.SERVING, 200), (Phase.RESTARTING, 503), (Phase.FAILED, 503)):
        reporter.state.enter(phase)
        async with session.get("/readyz") as response:
            assert response.status == ready
        async with session.get("/livez") as response:
            assert response.status == 200


async def test_metrics(served: Any) -> None:
    session, reporter = served
    reporter.state.enter(Phase.SERVING)
    reporter.state.begin_generation()
    reporter.state.restarts.append(1.0)
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert 'dsv4_agent_phase{phase="Serving"} 1.0' in lines
    assert 'dsv4_agent_phase{phase="Loading"} 0.0' in lines
    assert "dsv4_engine_generation 1.0" in lines
    assert "dsv4_engine_restarts_total 1.0" in lines


async def test_metrics_of_the_machine_the_fabric_and_failures(served: Any) -> None:
    session, reporter = served
    state = reporter.state
    state.signals = Signals(
        time=1.0,
        memory_available=5000,
        gpus=(
            GpuSignals(index=0, celsius=91, sm_mhz=500, sm_max_mhz=2400, slowed_by=("power cap",), memory_used=7),
            # With unified memory the driver reports no other value.
            GpuSignals(index=1, utilization=0.5),
        ),
    )
    state.warnings = ("GPU 0 has 91 °C",)
    state.weights_repaired = ("a", "b")
    state.kv_cache = 900, 1.0
    fabric = FabricStatus(
        rails=(
            Rail(interface="a", address="1.2.3.4/24", mtu=9000, hca="mlx5_0"),
            Rail(interface="b", address="1.2.4.4/24", mtu=1500),
        ),
        bandwidth=2e9,
        transport="Socket",
    )
    present = reporter.status
    reporter.status = lambda: present().model_copy(update={"fabric": fabric})
    async with session.get("/metrics") as response:
        text = await response.text()
    for line in (
        'dsv4_agent_health{health="Starting"} 1.0',
        "dsv4_agent_gpu_warnings 1.0",
        "dsv4_agent_weights_repaired 2.0",
        "dsv4_node_memory_available_bytes 5000.0",
        'dsv4_gpu_celsius{gpu="0"} 91.0',
        'dsv4_gpu_clock_mhz{gpu="0"} 500.0',
        'dsv4_gpu_memory_used_bytes{gpu="0"} 7.0',
        'dsv4_gpu_utilization{gpu="1"} 0.5',
        'dsv4_gpu_slowed{gpu="0",reason="power cap"} 1.0',
        "dsv4_fabric_rdma_rails 1.0",
        "dsv4_fabric_bandwidth_bytes 2e+09",
        'dsv4_fabric_transport{transport="Socket"} 1.0',
        "dsv4_engine_kv_cache_tokens 900.0",
    ):
        assert line in text.splitlines()
    # Values that are not reported have no sample.
    assert "dsv4_node_shared_memory_free_bytes" not in text
    assert 'dsv4_gpu_celsius{gpu="1"}' not in text


async def test_watches_send_changes_at_once_and_the_status_each_second(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, reporter = served
    async with session.get("/v1/watch", headers={"Authorization": "Bearer secret"}) as response:

        async def following() -> AgentStatus:
            return AgentStatus.model_validate_json(await asyncio.wait_for(response.content.readline(), 60))

        first = await following()
        assert first.phase is Phase.PREFLIGHT
        assert (await following()).time - first.time > 0.8
        # With this period only changes cause messages on the stream.
        monkeypatch.setattr(http, "_WATCH_SECONDS", 600.0)
        await following()
        died = Failure(time=1.0, cause=Cause.ENGINE_HUNG, message="it stands", detected_by="steps")
        changes = (
            (lambda: reporter.state.enter(Phase.LOADING, "reading"), "progress", Progress(stage="reading")),
            (lambda: reporter.state.advance(Progress(stage="more")), "progress", Progress(stage="more")),
            (lambda: reporter.state.enter(Phase.SERVING), "verdict", Verdict(health=Health.HEALTHY)),
            (lambda: reporter.state.suspect(died), "verdict", Verdict(health=Health.SUSPECT, failure=died)),
            (lambda: reporter.state.suspect(None), "verdict", Verdict(health=Health.HEALTHY)),
            (lambda: reporter.state.record_failure(died), "verdict", Verdict(health=Health.DEAD, failure=died)),
        )
        for change, name, expected in changes:
            change()
            while getattr(await following(), name) != expected:
                pass
        # The stream ends one period after the member.
        monkeypatch.setattr(http, "_WATCH_SECONDS", 0.1)
        reporter.state.enter(Phase.STOPPED)
        await following()
        assert await asyncio.wait_for(response.content.read(), 60) == b""


def _power(*watts: float | None, age: float = 0.0) -> Signals:
    gpus = tuple(GpuSignals(index=index, power_watts=each) for index, each in enumerate(watts))
    return Signals(time=1.0, gpus=gpus, gpus_age=age)


@pytest.mark.parametrize(
    ("own", "other", "watts"),
    [
        (_power(100.0, 50.04), _power(25.0), 175.0),
        (_power(100.0), None, None),
        (_power(100.0), _power(), None),
        (_power(100.0), _power(30.0, None), None),
        (_power(100.0), _power(30.0, age=6.0), None),
        (_power(), _power(30.0), None),
        (None, _power(30.0), None),
    ],
)
async def test_the_heads_own_stream_has_the_power_of_the_group(
    own: Signals | None, other: Signals | None, watts: float | None, served: Any, make_plan: Any
) -> None:
    session, reporter = served
    worker = MemberRecord(make_plan(), 1)
    reporter.state.signals, worker.signals = own, other
    reporter.peers[1] = Peer(status=worker.status(), heard=time.monotonic(), asked=time.monotonic())
    async with session.get("/v1/watch", headers={"Authorization": "Bearer secret"}) as response:
        found = AgentStatus.model_validate_json(await asyncio.wait_for(response.content.readline(), 3.0))
    assert found.group_watts == (None if watts is None else pytest.approx(watts, abs=0.06))


async def test_power_of_a_member_that_never_responded_is_not_known(served: Any) -> None:
    session, reporter = served
    reporter.state.signals = _power(100.0)
    reporter.peers[1] = Peer()
    async with session.get("/v1/watch", headers={"Authorization": "Bearer secret"}) as response:
        found = AgentStatus.model_validate_json(await asyncio.wait_for(response.content.readline(), 3.0))
    assert found.group_watts is None


async def test_the_heads_stream_reports_the_group_without_repetition(
    served: Any, make_plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, reporter = served
    worker = MemberRecord(make_plan(), 1)
    reporter.peers[1] = Peer(status=worker.status(), heard=time.monotonic() - 0.5, asked=time.monotonic())
    async with session.get("/v1/watch?group=1", headers={"Authorization": "Bearer secret"}) as response:

        async def following() -> GroupReport:
            return GroupReport.model_validate_json(await asyncio.wait_for(response.content.readline(), 60))

        first = await following()
        assert first.members is not None
        assert [one.rank for one in first.members] == [0, 1]
        assert first.ages[0] == 0.0
        assert 0.4 < first.ages[1] < 60
        second = await following()
        assert second.members is None
        assert second.ages[1] - first.ages[1] > 0.8
        # With this period only changes cause messages on the stream.
        monkeypatch.setattr(http, "_WATCH_SECONDS", 60.0)
        worker.enter(Phase.STAGING)
        reporter.state.signals = Signals(time=5.0)
        reporter.peers[1] = Peer(status=worker.status(), heard=time.monotonic(), asked=time.monotonic())
        third = await following()
        assert third.members is not None
        assert [one.phase for one in third.members] == [Phase.PREFLIGHT, Phase.STAGING]
        assert all(one.signals is None for one in third.members)
        reporter.state.enter(Phase.STOPPED)
        last = await following()
        assert last.members is not None
        assert await asyncio.wait_for(response.content.read(), 60) == b""


async def test_a_member_that_never_responded_has_no_age(served: Any) -> None:
    session, reporter = served
    reporter.peers[1] = Peer()
    async with session.get("/v1/watch?group=1", headers={"Authorization": "Bearer secret"}) as response:
        report = GroupReport.model_validate_json(await asyncio.wait_for(response.content.readline(), 60))
    assert report.ages == {0: 0.0}
    assert report.members is not None
    assert [one.rank for one in report.members] == [0]


async def test_metrics_of_kernels(served: Any) -> None:
    session, reporter = served
    seen = (
        ProviderStatus(provider="bundled", slowness=1.0),
        ProviderStatus(provider="marlin", slowness=1.28),
        ProviderStatus(provider="deep_gemm", excluded="t1: not done after 20 s"),
    )
    reporter.state.kernels.chosen(0, KernelStatus(op="moe", provider="bundled", standings=seen))
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert [line for line in lines if line.startswith("dsv4_kernel_")] == [
        'dsv4_kernel_provider{op="moe",provider="bundled"} 1.0',
        'dsv4_kernel_slowness{op="moe",provider="bundled"} 1.0',
        'dsv4_kernel_slowness{op="moe",provider="marlin"} 1.28',
        'dsv4_kernel_excluded{op="moe",provider="deep_gemm",seen="t1: not done after 20 s"} 1.0',
    ]
