"""The status page of a gateway: its document, the feed for viewers, and its paths."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_runtime.contract import AgentStatus, Cause, EngineStatus, Failure, Health, Phase, Verdict
from dsv4_runtime.contract.gateway import (
    PAGE_FAILURES,
    VIEWERS,
    CanaryReport,
    PageBudget,
    PageDeployment,
    PageFailure,
    PageGroup,
    StatusPage,
    page_event,
    page_file,
)
from dsv4_runtime.contract.token import canary_token
from dsv4_runtime.gateway.page import PATHS, EngineFigures, History, metric, requests_of
from dsv4_runtime.gateway.server import SharedResult
from dsv4_runtime.util.sse import HEARTBEAT, Feed, FeedFullError, payload
from dsv4_testkit.waiting import until

KEY = {"Authorization": "Bearer secret"}


def status(incarnation: int = 1, *failures: Failure, ready: float | None = None, dead: bool = False) -> AgentStatus:
    engine = EngineStatus(generation=1, failures=() if dead else failures, ready_time=ready)
    verdict = Verdict(health=Health.DEAD, failure=failures[-1]) if dead else Verdict(health=Health.HEALTHY)
    about = {"deployment": "d", "group": 0, "rank": 0, "phase": Phase.SERVING, "phase_time": 0.0, "time": 0.0}
    return AgentStatus(incarnation=incarnation, verdict=verdict, engine=engine, **about)


def death(moment: float, generation: int | None = 1, **more: Any) -> Failure:
    about = {"cause": Cause.ENGINE_HUNG, "message": "", "detected_by": "steps", **more}
    return Failure(time=moment, generation=generation, **about)


def test_a_death_is_one_entry_in_all_its_reports() -> None:
    history = History()
    history.note(status(1, death(10.0, cause=Cause.UNKNOWN), dead=True))
    history.note(status(1, death(10.4, level=1)))
    history.note(status(1, death(10.4, level=1, recover_seconds=5.0), death(60.0, None)))
    assert [(one.time, one.cause, one.recover_seconds) for one in history.merged((), {})] == [
        (10.4, Cause.ENGINE_HUNG, 5.0),
        (60.0, Cause.ENGINE_HUNG, None),
    ]


def test_a_death_that_ended_an_incarnation_is_recovered_by_the_next_one() -> None:
    history = History()
    history.note(status(1, death(10.0, level=2, culprit_rank=1), dead=True))
    history.note(status(2))
    assert history.merged((), {})[0].recover_seconds is None
    history.note(status(2, ready=90.5))
    history.note(status(2, ready=400.0))
    (one,) = history.merged((), {1: "spark-2"})
    assert (one.recover_seconds, one.node, one.incarnation) == (80.5, "spark-2", 1)


def test_deaths_of_the_control_side_are_added_and_all_are_bounded() -> None:
    history = History()
    for moment in range(3 * PAGE_FAILURES):
        history.note(status(1, death(float(moment), moment)))
    route = [PageFailure(time=70.0, incarnation=2, cause=Cause.NODE_LOST, node="a")]
    route += [PageFailure(time=59.0, incarnation=1, generation=59, node="b")]
    found = history.merged(route, {})
    assert len(found) == PAGE_FAILURES
    assert [(one.time, one.node) for one in found[-2:]] == [(59.0, "b"), (70.0, "a")]


def test_metrics_are_found_without_parsing_the_rest() -> None:
    text = b'# HELP a x\na{b="}\\n a 7"} 1\na_more 2\na 3.5\nx a 4\na{c=" "} nan\na{broken\n'
    assert metric(text, b"a")[:2] == [1.0, 3.5]
    assert metric(b"a nan\na{} +Inf\na -Inf\na 2\n", b"a") == [2.0]
    assert metric(b"", b"a") == metric(b"aa 1", b"a") == []


def test_rates_are_of_two_samples_and_a_new_engine_begins_again() -> None:
    def text(made: int) -> bytes:
        return (
            b'vllm:generation_tokens_total{engine="0"} %d\nvllm:generation_tokens_total{engine="1"} 100\n'
            b"vllm:prompt_tokens_total 50\nvllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.5\n" % made
        )

    figures = EngineFigures()
    figures.update(text(100), 10.0)
    assert figures.load is not None
    assert (figures.load.running, figures.load.tokens_per_second, figures.load.usage) == (2, None, 0.5)
    figures.update(text(300), 12.0)
    assert (figures.load.tokens_per_second, figures.load.prompt_tokens_per_second) == (100.0, 0.0)
    # The interval is too short for another rate.
    figures.update(text(301), 12.1)
    assert figures.load.tokens_per_second == 100.0
    figures.update(text(0), 14.0)
    assert figures.load.tokens_per_second == 0.0
    figures.update(b"", 15.0)
    assert figures.load is None


def test_counts_are_those_of_all_processes() -> None:
    text = b'dsv4_gateway_requests_total{outcome="ok"} 5.0\ndsv4_gateway_requests_total{outcome="lost"} 2.0\n'
    text += b"dsv4_gateway_active 3.0\ndsv4_gateway_held 1.0\ndsv4_gateway_held_bytes 9.0\n"
    found = requests_of([text, text.replace(b"{", b'{gateway="1",')])
    assert (found.ok, found.total, found.active, found.held, found.held_bytes) == (10, 14, 6, 2, 18)


def test_the_budget_counts_each_restart_once_and_within_the_window() -> None:
    assert PageBudget.of(3, 60.0, (1.0, 950.0, 950.0, 990.0), 1000.0).left == 1
    assert PageBudget.of(1, 60.0, (950.0, 990.0), 1000.0).left == 0


names = st.sampled_from(["a", "b", "n/a"])
deployments = st.lists(st.builds(PageDeployment, key=names, phase=names), max_size=3, unique_by=lambda one: one.key)
groups = st.lists(
    st.builds(PageGroup, deployment=names, index=st.integers(0, 2), phase=names),
    max_size=5,
    unique_by=lambda one: one.key,
)
pages = st.builds(
    StatusPage,
    source=st.just("gateway"),
    time=st.floats(0, 9),
    deployments=deployments.map(tuple),
    groups=groups.map(tuple),
)


@given(before=pages, after=pages)
def test_changes_lead_from_one_document_to_the_next(before: StatusPage, after: StatusPage) -> None:
    changes = after.since(before) or StatusPage(source="gateway", time=0)
    for entries in ("deployments", "groups"):
        found = {one.key: one for one in getattr(before, entries)} | {one.key: one for one in getattr(changes, entries)}
        kept = {key: one for key, one in found.items() if key not in changes.gone}
        assert kept == {one.key: one for one in getattr(after, entries)}
    assert after.since(after) is None
    assert StatusPage.model_validate_json(payload(page_event(None, after) or b"")) == after


def test_the_page_admits_its_own_script_alone_and_never_makes_markup() -> None:
    html, headers = page_file(key=True)
    text = html.decode()
    policy = headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert 'content="required"' in text
    assert 'content="none"' in page_file(key=False)[0].decode()
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        " style=",
        " onclick",
    ):
        assert sink not in text
    # Namespaces are identifiers; the page loads nothing from other hosts.
    assert {part.split("'")[0].split('"')[0] for part in text.split("http://")[1:]} == {"www.w3.org/2000/svg"}
    assert "https://" not in text
    assert len(html) < 60_000


class Numbers:
    """A value that counts how often it was computed."""

    def __init__(self) -> None:
        self.made = 0
        self.error: Exception | None = None

    async def make(self) -> int:
        self.made += 1
        if self.error is not None:
            raise self.error
        return self.made

    async def three_more(self) -> None:
        made = self.made
        await until(lambda: self.made >= made + 3)

    @staticmethod
    def encode(before: int | None, now: int) -> bytes:
        return b"whole %d" % now if before is None else b"%d to %d" % (before, now)


async def read(feed: Feed[Any], count: int, pause: Callable[[], Awaitable[None]] | None = None) -> list[bytes]:
    found = []
    with feed.place():
        async for event in feed.events(30.0):
            found.append(event)
            if len(found) == count:
                break
            await (pause() if pause else asyncio.sleep(0))
    return found


async def test_one_value_per_interval_is_made_for_all_readers_and_none_without() -> None:
    numbers, idle = Numbers(), []
    feed = Feed(numbers.make, numbers.encode, limit=4, seconds=0.05, idle=lambda: idle.append(1))
    await asyncio.sleep(0.1)
    assert numbers.made == 0
    found = await asyncio.gather(*(read(feed, 4) for _ in range(4)))
    assert found == [[b"whole 1", b"1 to 2", b"2 to 3", b"3 to 4"]] * 4
    assert numbers.made <= 5
    assert (feed.readers, idle) == (0, [1])
    made = numbers.made
    await asyncio.sleep(0.15)
    assert numbers.made == made
    # Later readers first receive a fresh value.
    assert (await read(feed, 1))[0] == b"whole %d" % (made + 1)
    await feed.close()


async def test_a_slow_reader_gets_complete_values() -> None:
    numbers = Numbers()
    feed = Feed(numbers.make, numbers.encode, limit=2, seconds=0.02)
    slow, fast = await asyncio.gather(read(feed, 3, numbers.three_more), read(feed, 12))
    assert all(event.startswith(b"whole") for event in slow)
    assert [event.startswith(b"whole") for event in fast] == [True] + [False] * 11
    await feed.close()


async def test_readers_are_bounded_and_end_with_the_feed() -> None:
    numbers = Numbers()
    feed = Feed(numbers.make, numbers.encode, limit=1, seconds=0.02)
    reading = asyncio.create_task(read(feed, 10**6))
    await until(lambda: numbers.made > 2)
    with pytest.raises(FeedFullError), feed.place():
        pass
    await feed.close()
    assert len(await asyncio.wait_for(reading, 60)) > 1
    with pytest.raises(FeedFullError), feed.place():
        pass


async def test_a_stream_ends_after_its_time() -> None:
    numbers = Numbers()
    feed = Feed(numbers.make, lambda before, now: b"x" if before is None else None, limit=1, seconds=0.02)
    with feed.place():
        begun = time.monotonic()
        found = [event async for event in feed.events(3.0)]
        assert 2.95 < time.monotonic() - begun < 60
    assert found[0] == b"x"
    assert set(found[1:]) == {HEARTBEAT}
    await feed.close()


async def test_a_value_that_cannot_be_made_is_logged_once_and_made_again(caplog: pytest.LogCaptureFixture) -> None:
    numbers = Numbers()
    numbers.error = OSError("broken")
    feed = Feed(numbers.make, numbers.encode, limit=1, seconds=0.02)
    reading = asyncio.create_task(read(feed, 1))
    await asyncio.sleep(0.2)
    assert (len(caplog.records), reading.done()) == (1, False)
    numbers.error = None
    assert (await asyncio.wait_for(reading, 60))[0].startswith(b"whole")
    await feed.close()


async def get(lab: Any, path: str, **headers: str) -> tuple[int, Any, bytes]:
    async with lab.client.get(lab.url + path, headers=headers) as answer:
        return answer.status, answer.headers, await answer.read()


async def test_the_page_is_open_and_its_data_require_the_key(kit: Any) -> None:
    async with kit.Lab(keys="secret\n") as lab:
        code, headers, html = await get(lab, "/dsv4/status")
        assert (code, html) == (200, page_file(key=True)[0])
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        for path in PATHS - {"/dsv4/status"}:
            assert (await get(lab, path))[0] == 401
            assert (await get(lab, path, Authorization="Bearer other"))[0] == 401
            assert (await get(lab, path + "?key=secret"))[0] == 401
        code, headers, body = await get(lab, "/dsv4/status.json", **KEY)
        assert (code, headers["Cache-Control"]) == (200, "no-store")
        page = StatusPage.model_validate_json(body)
        assert b"secret" not in body
        assert b"the key" not in body
        assert lab.engine.token.encode() not in body
        (deployment,), (group,) = page.deployments, page.groups
        assert (deployment.key, deployment.phase, deployment.ready, deployment.models) == ("d", "Serving", 1, ("nano",))
        assert (group.phase, group.verdict and group.verdict.health) == ("Serving", Health.HEALTHY)
        async with lab.client.post(lab.url + "/dsv4/status", headers=KEY) as answer:
            assert answer.status == 405
        async with lab.client.head(lab.url + "/dsv4/status/events", headers=KEY) as answer:
            assert answer.status == 200


async def test_a_death_is_on_the_page_with_evidence_and_the_engines_figures(kit: Any) -> None:
    async with kit.Lab() as lab:
        await lab.post("/v1/completions", {"model": "nano", "prompt": "a", "max_tokens": 2})
        assert (lab.engine.scrapes, lab.engine.group_watches) == (0, 0)
        found: dict[str, Any] = {}
        async with lab.client.get(lab.url + "/dsv4/status/events") as answer, asyncio.timeout(60):
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            while True:
                event = await answer.content.readuntil(b"\n\n")
                if not (data := payload(event)):
                    continue
                for group in json.loads(data).get("groups", []):
                    found = group
                if "rate" not in found and found.get("load", {}).get("tokensPerSecond", 0) > 0:
                    assert found["cache" if "cache" in found else "load"]
                    assert found["load"]["waiting"] == 3
                    assert found["members"][0]["memory"]["available"] == 0
                    await lab.engine.change(deaths=(time.time(),), phase="Restarting", health="Dead", text="<b>x</b>")
                if found.get("failures"):
                    break
        assert (found["phase"], found["verdict"]["health"]) == ("Restarting", "Dead")
        assert (found["failures"][0]["cause"], found["failures"][0]["message"]) == ("EngineHung", "<b>x</b>")
        await until(lambda: lab.gateway._page._watches == {})
        scrapes = lab.engine.scrapes
        await asyncio.sleep(1.5)
        # There are no viewers left.
        assert lab.engine.scrapes == scrapes
        assert lab.gateway._page._watches == {}
        _, _, body = await get(lab, "/dsv4/status.json")
        (deployment,) = StatusPage.model_validate_json(body).deployments
        assert deployment.requests is not None
        assert (deployment.requests.ok, deployment.phase) == (1, "Recovering")


async def test_the_operators_canary_brings_the_figures(kit: Any) -> None:
    async with kit.Lab() as lab:
        token = {"Authorization": f"Bearer {canary_token('the key')}"}
        first = CanaryReport.model_validate_json((await get(lab, "/dsv4/canary", **token))[2])
        assert first.ok
        assert first.figures is not None
        assert (first.figures.loads[0].waiting, first.figures.loads[0].tokens_per_second) == (3, None)
        await asyncio.sleep(2.1)
        await lab.post("/v1/completions", {"model": "nano", "prompt": "a", "max_tokens": 2})
        later = CanaryReport.model_validate_json((await get(lab, "/dsv4/canary", **token))[2])
        assert later.figures is not None
        assert (later.figures.requests.ok, later.figures.loads[0].usage) == (1, 0.25)
        assert later.figures.loads[0].tokens_per_second
        assert lab.engine.scrapes == 2

        async def broken() -> None:
            raise ValueError("broken")

        lab.gateway._figures = SharedResult(broken, 0.0)
        alone = CanaryReport.model_validate_json((await get(lab, "/dsv4/canary", **token))[2])
        assert (alone.ok, alone.figures) == (True, None)


async def test_viewers_are_bounded_and_end_with_the_gateway(kit: Any) -> None:
    async with kit.Lab(drain_seconds=600.0) as lab:
        streams = [await lab.client.get(lab.url + "/dsv4/status/events") for _ in range(VIEWERS)]
        code, headers, text = await get(lab, "/dsv4/status/events")
        assert (code, headers["Retry-After"]) == (503, "10")
        assert b"8 of 8 viewers" in text
        streams.pop().close()
        async with asyncio.timeout(60):
            while (await get(lab, "/dsv4/status.json"))[0] != 200:
                await asyncio.sleep(0.05)
        lab.stop.set()
        # Streams of the page do not delay the shutdown of a gateway.
        await asyncio.wait_for(asyncio.shield(lab.serving), 60)
        for stream in streams:
            await stream.read()


async def test_a_new_route_leaves_the_groups_of_a_document_that_is_being_made(kit: Any) -> None:
    async with kit.Lab() as lab:
        page = lab.gateway._page
        entered, go = asyncio.Event(), asyncio.Event()

        async def gateways() -> list[bytes]:
            entered.set()
            await go.wait()
            return []

        page._gateways = gateways
        making = asyncio.ensure_future(page.make())
        await entered.wait()
        lab.point(lab.upstream, others={"http://127.0.0.1:9": "lost"})
        assert lab.gateway._groups.routes.changed()
        await lab.gateway._groups._apply()
        go.set()
        made = await making
        assert [(group.index, group.phase) for group in made.groups] == [(0, "Serving")]
        assert (made.deployments[0].wanted, made.deployments[0].phase) == (1, "Serving")
        assert sorted(lab.gateway._groups.all) == [0, 1]
        page._rest()
