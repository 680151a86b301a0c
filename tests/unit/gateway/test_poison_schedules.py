"""Random schedules of innocent and poison requests, over one or two gateways of one engine.

The engine is scripted: a poison request kills it, or makes it hang and die, each time it has been processed for a
certain time. A hang continues after the client leaves. Invariants: no innocent request is refused; every poison is
refused by each gateway after a bounded number of deaths; the memory of the gateways is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from dsv4_runtime.gateway import proxy, routing, suspects

COMPLETIONS = "/v1/completions"
DEATHS = 5
"""Maximum number of engines that one poison may cost each gateway."""


@pytest.fixture
def fast(monkeypatch):
    """Reduce all times to a quarter."""
    for module, name in (
        *((suspects, name) for name in ("DRAIN_SECONDS", "TRIAL_SECONDS", "PROBE_SECONDS")),
        (suspects, "TURN_SECONDS"),
        (proxy, "TURN_SECONDS"),
        (suspects, "SETTLE_SECONDS"),
        (routing, "SETTLE_SECONDS"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) / 4)


@dataclass(frozen=True)
class Poison:
    """A request that kills engines."""

    prompt: str
    after: float
    """Seconds until the engine dies or hangs."""
    hang: float
    """Duration of the hang in seconds; 0: the engine dies at once."""
    patience: float | None
    """Seconds until its client leaves and sends the request again; None: the client waits."""


class World:
    """An engine in which one hanging request blocks all others."""

    def __init__(self, engine, poisons):
        self.engine, self.deaths = engine, 0
        self._poisons = {poison.prompt: poison for poison in poisons}
        self._hung = asyncio.Event()
        engine.script = self.script

    async def script(self, request, body):
        generation, poison = self.engine.generation, self._poisons.get(body["prompt"])
        if poison is not None:
            await asyncio.sleep(poison.after)
            if self.engine.alive and self.engine.generation == generation:
                self._hung.set()
                self.engine.spawn(self.die(generation, poison.hang))
            await asyncio.sleep(600)
        end = asyncio.get_running_loop().time() + body.get("seconds", 0.0)
        stream = None
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
            if self._hung.is_set() or self.engine.generation != generation:
                await asyncio.sleep(600)
            if body.get("stream"):
                if stream is None:
                    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                    await stream.prepare(request)
                await stream.write(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n')
        if self._hung.is_set():
            await asyncio.sleep(600)
        if stream is not None:
            await stream.write(b"data: [DONE]\n\n")
        return stream or web.json_response({"choices": []})

    async def die(self, generation, hang):
        await asyncio.sleep(hang)
        if self.engine.generation == generation and self.engine.alive:
            self.deaths += 1
            await self.engine.die(0.1)
            await asyncio.sleep(0.05)
            self._hung.clear()


async def send(session, url, body, patience=None):
    """Return status and error code; None if the client left."""
    try:
        async with asyncio.timeout(patience), session.post(url + COMPLETIONS, json=body) as answer:
            raw = await answer.read()
            code = json.loads(raw)["error"]["code"] if answer.status >= 400 else None
            if b"engine_fatal" in raw:
                code = "engine_fatal"
            return answer.status, code
    except TimeoutError:
        return None


def poisons_of(draw, count):
    for index in range(count):
        hang = draw.choice([0.0, 0.0, 0.6])
        after = draw.choice([0.0, 0.05, 0.3])
        patience = draw.choice([None, 0.3, after + hang + 0.2])
        yield Poison(f"poison {index}", after, hang, patience)


async def innocents(draw, session, urls, index, ended, found):
    """A client with one request at a time, sometimes repeated, sometimes with a client-side timeout."""
    number = 0
    while not ended.is_set():
        number += draw.random() < 0.7
        body = {"prompt": f"innocent {index} {number}", "seconds": draw.choice([0.0, 0.1, 0.5])}
        # If the engine dies, a stream that has begun and cannot be continued ends with an error event.
        body["stream"] = draw.random() < 0.3
        found.append(await send(session, draw.choice(urls), body, draw.choice([None, None, None, 1.0])))
        await asyncio.sleep(draw.random() * 0.2)


@pytest.mark.parametrize("seed", range(8))
async def test_all_fatal_and_no_harmless_requests_are_refused(kit, fast, seed):
    draw = random.Random(seed)
    gateways, poisons = 1 + seed % 2, list(poisons_of(draw, 1 + seed % 3 // 2))
    engine = kit.Engine()
    world, ended, found = World(engine, poisons), asyncio.Event(), []
    async with contextlib.AsyncExitStack() as stack:
        labs = [
            await stack.enter_async_context(
                kit.Lab(engine=engine, request_timeout_seconds=100.0, hold_timeout_seconds=60.0, max_held_requests=100)
            )
            for _ in range(gateways)
        ]
        urls = [lab.url for lab in labs]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        clients = [
            asyncio.ensure_future(innocents(random.Random(f"{seed} {index}"), session, urls, index, ended, found))
            for index in range(draw.choice([1, 3, 6]))
        ]

        async def persistent(poison):
            refused = set()
            while len(refused) < gateways:
                url = draw.choice([url for url in urls if url not in refused])
                answer = await send(session, url, {"prompt": poison.prompt}, poison.patience)
                if answer is not None and answer[1] in ("engine_fatal", "engine_lost"):
                    refused.add(url)
                await asyncio.sleep(0.01)

        await asyncio.wait_for(asyncio.gather(*(persistent(poison) for poison in poisons)), 300)
        assert world.deaths <= DEATHS * gateways * len(poisons)
        deaths = world.deaths
        for poison in poisons:
            for url in urls:
                status, _ = await send(session, url, {"prompt": poison.prompt}, 60)
                assert status in (422, 502)
        ended.set()
        await asyncio.wait_for(asyncio.gather(*clients), 60)
        assert world.deaths == deaths
        assert all(lab.gateway._proxy.suspects.size <= 500 for lab in labs)
    print(seed, gateways, len(poisons), poisons, "deaths", deaths, Counter(found))
    assert not [answer for answer in found if answer is not None and answer[1] == "engine_fatal"]
    assert not [answer for answer in found if answer is not None and answer[0] not in (200,)]
