"""Kinds of requests that kill engines: classification of requests, and the kinds that are refused.

The first part generates pure histories of deaths, responses and processes. The second part runs schedules of clients
against a scripted engine that dies of one kind. Invariants: a kind that gets responses is never refused, nor is a plain
request; a deadly kind costs two engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket

import aiohttp
import pytest

from dsv4_runtime.contract import Cause
from dsv4_runtime.contract.gateway import FatalRequests, Kind
from dsv4_runtime.gateway import kinds, routing, suspects
from dsv4_runtime.gateway.errors import RefusedError
from dsv4_runtime.gateway.kinds import KEPT_SECONDS, LONG_BYTES, PROVEN_SECONDS, FatalKinds, kinds_of
from dsv4_testkit.errors import raises_naming
from dsv4_testkit.waiting import until

S, T, M, L = Kind.STRUCTURED_OUTPUT, Kind.TOOLS, Kind.IMAGES, Kind.LONG_CONTEXT
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"format": {}, "tools": {}}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "Once"}, set()),
        ({"prompt": 'a text with "tools": [1] and "response_format": {"type": "json_object"}'}, set()),
        ({"response_format": {"type": "text"}}, set()),
        ({"response_format": None, "tools": [], "tool_choice": "none"}, set()),
        ({"response_format": {"type": "json_object"}}, {S}),
        ({"response_format": SCHEMA}, {S}),
        ({"response_format": {"type": "structural_tag", "structures": []}}, {S}),
        ({"text": {"format": SCHEMA}}, {S}),
        ({"structured_outputs": {"regex": "a+"}}, {S}),
        ({"guided_choice": ["a", "b"]}, {S}),
        ({"tools": [TOOL]}, {T}),
        ({"tools": [TOOL], "tool_choice": "auto"}, {T}),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {T}),
        ({"tools": [TOOL], "tool_choice": "required"}, {S, T}),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, {S, T}),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {S, T}),
        ({"messages": PICTURE}, {M}),
        ({"messages": PICTURE, "tools": [TOOL]}, {M, T}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "image_url"}]}]}, set()),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, {M}),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, {M}),
        ({"prompt": "a " * LONG_BYTES}, {L}),
        ({"prompt": "a " * LONG_BYTES, "tools": [TOOL]}, {L, T}),
        ({"messages": PICTURE, "padding": "a" * LONG_BYTES}, {M}),
    ],
)
def test_the_kinds_of_a_request(body, expected):
    assert kinds_of(bytearray(json.dumps(body).encode())) == expected


@pytest.mark.parametrize("seed", range(300))
def test_any_body_has_kinds(seed):
    """Every relevant field has values of any type."""
    draw = random.Random(seed)

    def value(depth=0):
        leaf = draw.choice([None, True, 3, "required", "json_object", "image", [], {}])
        if depth > 3 or draw.random() < 0.3:
            return leaf
        names = ["type", "format", "content", "tools", "tool_choice", "response_format", "messages", "input", "text"]
        if draw.random() < 0.5:
            return [value(depth + 1) for _ in range(draw.randrange(3))]
        return {name: value(depth + 1) for name in draw.sample(names, 3)}

    kinds_of(json.dumps({"tools": value(), "messages": value(), "input": value(), "text": value()}).encode())
    kinds_of(json.dumps(value()).encode())
    kinds_of(b'{"tools"' + draw.randbytes(20))


class Clock:
    def __init__(self):
        self.now = 100_000.0

    def __call__(self):
        return self.now


class History:
    """One to three processes of a gateway, and one engine."""

    def __init__(self, processes=1):
        self.clock = Clock()
        self.all = [FatalKinds(self.clock, lambda: None) for _ in range(processes)]
        for process in self.all:
            process.shared = processes > 1
        self.generation = 0

    def died(self, *requests, cause=Cause.ENGINE_CORE_DIED):
        """End a generation that has `requests`: process, name and kinds of each."""
        self.generation += 1
        # One process after the other, and not always in the same order.
        for index, process in sorted(enumerate(self.all), reverse=self.generation % 2 == 0):
            own = {name.encode(): frozenset(kind) for at, name, kind in requests if at == index}
            process.died(f"1-g{self.generation}", own, cause)
            self.clock.now += 0.002
        self.clock.now += 2 * kinds.SETTLED_SECONDS
        self.share()

    def replace(self, index):
        """Replace a process; the next one gets the observations of the others."""
        self.all[index] = FatalKinds(self.clock, lambda: None)
        self.all[index].shared = True
        self.share()

    def share(self):
        for process in self.all:
            for peer in self.all:
                if peer is not process:
                    process.take(type(peer.report()).model_validate_json(peer.report().to_json()))
            if process.shared:
                process.judge()

    def refused(self, kind):
        """Return whether the processes refuse a kind; all must agree."""
        found = set()
        for process in self.all:
            try:
                process.check(frozenset(kind))
                found.add(False)
            except RefusedError:
                found.add(True)
        assert len(found) == 1, "the processes differ"
        return found.pop()


@pytest.mark.parametrize("kind", [{S}, {T}, {M}, {L}, {S, T}])
def test_after_two_deaths_a_kind_is_refused_and_no_other_one(kind):
    history = History()
    history.died((0, "one", kind), (0, "plain", ()))
    assert not history.refused(kind)
    history.died((0, "two", kind), (0, "another", ()))
    assert history.refused(kind)
    assert history.refused(kind | {M})
    assert not history.refused(())
    assert not any(history.refused({other}) for other in Kind if not {other} >= kind)


def test_a_kind_with_a_recent_answer_is_not_refused():
    for seconds, refused in ((PROVEN_SECONDS - 1, False), (PROVEN_SECONDS + 1, True)):
        history = History()
        history.all[0].answered(frozenset({S, T}))
        history.clock.now += seconds
        history.died((0, "one", {S}))
        history.died((0, "two", {S}))
        assert history.refused({S}) is refused
    # The same with a response in between.
    history = History()
    history.died((0, "one", {S}))
    history.all[0].answered(frozenset({S}))
    history.died((0, "two", {S}))
    assert not history.refused({S})
    # A response to another kind proves nothing.
    history = History()
    history.died((0, "one", {S}))
    history.all[0].answered(frozenset({T}))
    history.died((0, "two", {S}))
    assert history.refused({S})


def test_a_kind_is_not_refused_if_something_else_explains_both_deaths():
    history = History()
    history.died((0, "poison", ()), (0, "one", {S}))
    history.died((0, "poison", ()), (0, "two", {S}))
    assert not history.refused({S})
    history = History()
    history.died((0, "one", {S}), (0, "two", {T}))
    history.died((0, "three", {S}), (0, "four", {T}))
    assert not history.refused({S})
    assert not history.refused({T})
    # A third death confirms it.
    history.died((0, "three", {S}))
    assert history.refused({S})
    assert not history.refused({T})


def test_a_death_of_an_idle_engine_is_left_out():
    history = History()
    history.died((0, "poison", ()), (0, "one", {S}))
    history.died()
    history.died((0, "poison", ()), (0, "two", {S}))
    assert not history.refused({S})
    history.died()
    history.died((0, "three", {S}))
    assert history.refused({S})


def test_a_death_without_the_kind_is_another_reason():
    history = History()
    history.died((0, "one", {S}))
    history.died((0, "plain", ()))
    history.died((0, "two", {S}))
    assert not history.refused({S})


@pytest.mark.parametrize("cause", sorted(Cause))
def test_deaths_that_no_request_causes_do_not_count(cause):
    history = History()
    for _ in range(3):
        history.died((0, "one", {S}), cause=cause)
    assert history.refused({S}) is kinds.is_of_requests(cause)
    if cause in (Cause.NODE_LOST, Cause.DISK_FULL, Cause.WEIGHTS_CORRUPT, Cause.OUT_OF_MEMORY_HOST, Cause.AGENT_HUNG):
        assert not history.refused({S})


def test_a_refusal_ends_and_one_further_death_doubles_it():
    history, ends = History(), []
    history.died((0, "one", {S}))
    history.died((0, "two", {S}))
    for number in range(8):
        begun = history.clock.now
        while history.refused({S}) and history.clock.now - begun < 10_000.0:
            history.clock.now += 10.0
        ends.append(round(history.clock.now - begun))
        history.died((0, f"again {number}", {S}))
    # The clock advances in steps of 10 s.
    assert ends == [600, 1200, 2400, 4800, 7200, 7200, 7200, 7200]
    # A response after the end of the refusal clears the kind.
    history.clock.now += 7200.0
    history.all[0].answered(frozenset({S}))
    history.clock.now += PROVEN_SECONDS + 1
    history.died((0, "late", {S}))
    assert not history.refused({S})


def test_an_answer_of_another_process_that_arrives_late_ends_a_refusal():
    history = History(2)
    history.died((0, "one", {S}))
    history.all[1].answered(frozenset({S}))
    history.all[0].died("1-g2", {b"two": frozenset({S})}, Cause.ENGINE_CORE_DIED)
    history.all[0].judge()
    history.clock.now += 2 * kinds.SETTLED_SECONDS
    history.all[0].judge()
    with pytest.raises(RefusedError):
        history.all[0].check(frozenset({S}))
    history.share()
    history.all[0].check(frozenset({S}))


def test_deaths_that_other_processes_may_not_have_recorded_are_not_judged():
    history = History(2)
    for generation in ("1", "2"):
        history.all[0].died(generation, {generation.encode(): frozenset({S})}, Cause.ENGINE_CORE_DIED)
        history.all[0].judge()
    history.all[0].check(frozenset({S}))
    history.clock.now += 2 * kinds.SETTLED_SECONDS
    history.all[0].judge()
    with pytest.raises(RefusedError):
        history.all[0].check(frozenset({S}))


def test_deaths_far_apart_do_not_count_together():
    history = History()
    history.died((0, "one", {S}))
    history.clock.now += KEPT_SECONDS + 1
    history.died((0, "two", {S}))
    assert not history.refused({S})


@pytest.mark.parametrize("seed", range(200))
def test_histories(seed):
    """Any number of processes; a deadly kind, innocent requests of every kind, poison requests, other deaths.

    Whether processes are replaced meanwhile changes nothing.
    """
    assert life(seed, replaces=False) == life(seed, replaces=True)


def life(seed, *, replaces):
    """Return the refused kinds after each step."""
    draw, replaced = random.Random(seed), random.Random(seed)
    history, found = History(draw.choice([1, 2, 3])), []
    deadly = draw.choice([None, {S}, {T}, {M}, {L}, {S, T}, {M, T}])
    poison = draw.choice([None, frozenset(), frozenset({T})])
    every = [frozenset(kind) for kind in ((), {S}, {T}, {M}, {L}, {S, T}, {L, T})]
    innocent = [kind for kind in every if deadly is None or not deadly <= kind]
    for process in history.all:
        # Innocent kinds get responses before the first death.
        for kind in innocent:
            process.answered(kind)
    deaths = 0
    for step in range(40):
        history.clock.now += draw.random() * 60
        # Innocent requests that complete.
        for kind in innocent:
            draw.choice(history.all).answered(kind)
        history.share()
        if replaces and len(history.all) > 1 and replaced.random() < 0.3:
            history.replace(replaced.randrange(len(history.all)))
        found.append([kind for kind in every if history.refused(kind)])
        held = [
            (draw.randrange(len(history.all)), f"{step} {i}", draw.choice(innocent)) for i in range(draw.randrange(5))
        ]
        what = draw.random()
        if deadly is not None and what < 0.4:
            if history.refused(deadly):
                continue
            deaths += 1
            history.died(*held, (draw.randrange(len(history.all)), f"deadly {step}", deadly))
        elif poison is not None and what < 0.6 and (deadly is None or not deadly <= poison):
            history.died(*held, (0, "poison", poison))
        elif what < 0.7:
            history.died(*held, cause=Cause.NODE_LOST)
        for kind in innocent:
            assert not history.refused(kind), (deadly, kind)
    if deadly is not None and poison is None and deaths >= 2:
        # After the second death, each period of refusal (600 s, then twice as long) ends with at most one death.
        assert deaths <= 4
        assert any(process.report().deaths for process in history.all)
    return found


def exposed(name: str, kind: set[Kind]) -> routing.Exposures:
    """Return the exposures of an engine generation with one request."""
    found = routing.Exposures()
    found.enter(name.encode(), name, 1, 0.0, frozenset(kind))
    return found


def test_a_request_of_a_kind_that_is_not_proven_is_tried_alone_after_one_death():
    for kind, trial in (({S}, True), (set(), False)):
        found = suspects.Suspects()
        found.died("1", exposed("one", kind), reported=True)
        assert found.suspected(b"one", frozenset(kind)) is trial
        found.kinds.answered(frozenset({S, T}))
        assert not found.suspected(b"one", frozenset(kind))


def test_unreported_ends_cause_no_refusal_of_a_kind():
    for reported in (False, True):
        found = suspects.Suspects()
        for generation in ("1", "2"):
            found.died(generation, exposed(f"in {generation}", {S}), reported=reported)
        if reported:
            with raises_naming(RefusedError, "structured output", "600 s", ": 2"):
                found.suspected(b"new", frozenset({S}))
        else:
            assert not found.suspected(b"new", frozenset({S}))
            assert found.found.kinds == ()


# Schedules against an engine.

BODIES = {
    (): {},
    (S,): {"response_format": {"type": "json_object"}},
    (T,): {"tools": [{"type": "function"}]},
    (S, T): {"tools": [{"type": "function"}], "tool_choice": "required"},
}


@pytest.fixture
def fast(monkeypatch):
    """Reduce all times to a tenth."""
    for module, name in (
        *((suspects, name) for name in ("DRAIN_SECONDS", "TRIAL_SECONDS", "PROBE_SECONDS", "TURN_SECONDS")),
        (suspects, "SETTLE_SECONDS"),
        (routing, "SETTLE_SECONDS"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) / 10)
    monkeypatch.setattr("dsv4_runtime.gateway.server._SHARE_KINDS_SECONDS", 0.02)
    monkeypatch.setattr(kinds, "SETTLED_SECONDS", 0.05)


class World:
    """An engine that dies of one kind and then loses all its requests."""

    def __init__(self, engine, deadly):
        self.engine, self.deadly, self.deaths = engine, deadly, 0
        engine.script = self.script

    async def script(self, request, body):
        generation = self.engine.generation
        if self.deadly is not None and self.deadly <= kinds_of(json.dumps(body).encode()):
            await asyncio.sleep(0.03)
            if self.engine.generation == generation and self.engine.alive:
                self.deaths += 1
                await self.engine.die(0.3)
        else:
            end = asyncio.get_running_loop().time() + body.get("seconds", 0.0)
            while asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.01)
            if self.engine.generation == generation and self.engine.alive:
                return web_answer()
        request.transport.abort()
        return web_answer()


def web_answer():
    return aiohttp.web.json_response({"choices": []})


async def send(session, url, kind, prompt, seconds=0.0):
    body = {"prompt": prompt, "seconds": seconds, **BODIES[kind]}
    async with session.post(url + "/v1/completions", json=body) as answer:
        raw = await answer.json()
        return answer.status, raw["error"]["code"] if answer.status >= 400 else None


async def test_a_process_that_replaces_another_one_refuses_the_same_kinds(kit, fast):
    engine, listeners = kit.Engine(), [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    async with kit.Lab(engine=engine, listener=listeners[0], peers=(urls[1],)) as first:
        known = first.gateway._proxy.suspects.kinds
        for generation in ("1", "2"):
            known.died(generation, {generation.encode(): frozenset({S})}, Cause.ENGINE_CORE_DIED)
        await until(lambda: known.found)
        async with (
            kit.Lab(engine=engine, listener=listeners[1], peers=(urls[0],)) as second,
            aiohttp.ClientSession() as session,
        ):
            await until(lambda: second.gateway._proxy.suspects.kinds.found)
            assert await send(session, urls[1], (S,), "Once") == (422, "engine_fatal_kind")
            assert (await fatal_requests(session, urls[1])).kinds[0].engines == 2


async def fatal_requests(session, url):
    async with session.get(url + "/dsv4/fatal-requests") as answer:
        return FatalRequests.model_validate_json(await answer.read())


@pytest.mark.parametrize("seed", range(8))
async def test_a_fatal_kind_costs_two_engines_and_no_harmless_request_is_refused(kit, fast, seed):
    draw = random.Random(seed)
    deadly = draw.choice([(S,), (T,), (S, T)])
    innocent = [kind for kind in BODIES if not set(deadly) <= set(kind)]
    engine, processes = kit.Engine(), 1 + seed % 2
    world, ended, found = World(engine, frozenset(deadly)), asyncio.Event(), []
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(processes)]
    urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    async with contextlib.AsyncExitStack() as stack:
        for listener, url in zip(listeners, urls, strict=True):
            lab = kit.Lab(
                engine=engine,
                listener=listener,
                peers=tuple(other for other in urls if other != url),
                request_timeout_seconds=100.0,
                hold_timeout_seconds=60.0,
                max_held_requests=100,
            )
            await stack.enter_async_context(lab)
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def innocents(index):
            own = random.Random(f"{seed} {index}")
            number = 0
            while not ended.is_set():
                number += 1
                kind = own.choice(innocent)
                found.append(
                    (
                        kind,
                        await send(session, own.choice(urls), kind, f"{index} {number}", own.choice([0.0, 0.1, 0.3])),
                    )
                )
                await asyncio.sleep(own.random() * 0.05)

        clients = [asyncio.ensure_future(innocents(index)) for index in range(draw.choice([1, 3, 6]))]
        if draw.random() < 0.5:
            await asyncio.sleep(0.5)
        refused = await asyncio.gather(
            *(send(session, draw.choice(urls), deadly, f"deadly {index}") for index in range(draw.choice([1, 2, 5])))
        )
        assert {code for _, code in refused} <= {"engine_fatal_kind", "engine_fatal"}
        # A new request of the kind is refused at once by each process.
        deaths = world.deaths
        for url in urls:
            async with asyncio.timeout(60):
                while not (await fatal_requests(session, url)).kinds:
                    await asyncio.sleep(0.01)
            assert await send(session, url, deadly, "a new one") == (422, "engine_fatal_kind")
        ended.set()
        await asyncio.wait_for(asyncio.gather(*clients), 60)
        assert world.deaths == deaths
        report = await fatal_requests(session, urls[-1])
    print(seed, processes, deadly, "deaths", deaths, len(found))
    assert [set(kind.kinds) for kind in report.kinds] == [set(deadly)]
    assert deaths == 2 or (deaths == 3 and len(found) > 0)
    assert not [answer for answer in found if answer[1] != (200, None)]
