"""The status page in Chromium: paint, memory, accessibility, keyboard, hostile texts, connections.

`DSV4_SCREENSHOTS=write` writes the pictures of docs/status-page.md.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import string
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.controller.observability import PageServer
from dsv4_runtime.contract import Cause, Health, KernelStatus, MemoryUse, ProviderStatus
from dsv4_runtime.contract.gateway import (
    PageBudget,
    PageCache,
    PageDeployment,
    PageFailure,
    PageGroup,
    PageLoad,
    PageMember,
    PageRequests,
    PageVerdict,
    StatusPage,
    page_event,
)
from dsv4_runtime.util.sse import Feed
from dsv4_testkit.browser import CHROMIUM, MISSING, chromium, network_changed, reload, until, visit
from dsv4_testkit.waiting import free_port

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
IMAGES = Path(__file__).parents[3] / "docs" / "images"
KEY = "schlüssel-€"
FIRST_PAINT_MS = 200
HEAP_BYTES = 50 * 2**20
HOUR = 3600.0


def hang(moment: float, **more: Any) -> PageFailure:
    about: dict[str, Any] = {
        **{"cause": Cause.ENGINE_HUNG, "incarnation": 3, "generation": 2, "level": 1, "rank": 1, "node": "spark-4"},
        "message": "no step for 8.2 s with 3 running requests; rank 1 has begun 1201 collectives, rank 0 1202",
        **{"detected_by": "steps", **more},
    }
    return PageFailure(time=moment, **about)


def serving(index: int, now: float, deployment: str = "flash", **changes: Any) -> PageGroup:
    first = 2 * index + 1
    warning = "GPU 0: clock 850 MHz of 2418 MHz, slowed by software thermal slowdown"
    members = tuple(
        PageMember(
            rank=rank,
            node=f"spark-{first + rank}",
            phase="Serving",
            health=Health.HEALTHY,
            since=now - 2 * HOUR,
            warnings=(warning,) if (index, rank) == (0, 1) else (),
            memory=MemoryUse(available=(42 + rank) * 2**29),
        )
        for rank in range(2)
    )
    core = hang(
        now - 2 * HOUR - 90 - 4000 * index,
        cause=Cause.ENGINE_CORE_DIED,
        generation=1,
        node=f"spark-{first + 1}",
        message="(EngineCore pid=4121) RuntimeError: CUDA error: an illegal memory access was encountered",
        detected_by="process",
        recover_seconds=63.4,
        evidence="evidence/3-g1",
    )
    lost = hang(
        now - (7 + index) * HOUR,
        **{"cause": Cause.NODE_LOST, "incarnation": 2, "generation": None, "level": 2, "node": f"spark-{first + 1}"},
        **{"message": "rank 1 is silent for 20 s, and its machine does not answer", "detected_by": "peer"},
        recover_seconds=191.0,
    )
    kernels = (
        KernelStatus(op="moe", provider="bundled", standings=standings(bundled=1.0, marlin=1.31)),
        KernelStatus(op="fp8_linear", provider="bundled", standings=standings(bundled=1.0, cutlass=1.12)),
        KernelStatus(op="mla_decode", provider="bundled", standings=standings(bundled=1.0)),
        KernelStatus(op="topk", provider="stock"),
    )
    return PageGroup(
        deployment=deployment,
        index=index,
        phase="Serving",
        since=now - 2 * HOUR,
        incarnation=3,
        generation=2,
        ready_since=now - 2 * HOUR,
        verdict=PageVerdict(health=Health.HEALTHY),
        members=members,
        budget=PageBudget(allowed=5, left=5 - index, window_seconds=HOUR),
        cache=PageCache(tokens=812_544, planned_tokens=806_912, concurrency=6.2, usage=0.37 + 0.2 * index),
        load=PageLoad(running=3, waiting=0, tokens_per_second=82.4, prompt_tokens_per_second=1210.0),
        memory={"weights": -83 * 2**20, "activations": 412 * 2**20, "KV cache": 55 * 2**20},
        kernels=kernels,
        failures=(lost, core),
    ).model_copy(update=changes)


def standings(**slowness: float) -> tuple[ProviderStatus, ...]:
    return tuple(ProviderStatus(provider=name, slowness=value) for name, value in slowness.items())


def restarting(index: int, now: float, deployment: str = "flash") -> PageGroup:
    before = serving(index, now)
    failure = hang(now - 12.0, node=before.members[1].node)
    verdict = PageVerdict(health=Health.DEAD, cause=failure.cause, message=failure.message)
    members = tuple(
        one.model_copy(update={"phase": "Restarting", "message": "loading shards 2/4" if not one.rank else ""})
        for one in before.members
    )
    changes: dict[str, Any] = {"phase": "Restarting", "since": now - 12.0, "ready_since": None, "members": members}
    changes |= {"verdict": verdict, "load": None, "cache": None, "failures": (*before.failures, failure)}
    return before.model_copy(update={**changes, "deployment": deployment})


def gateway_page(now: float) -> StatusPage:
    """Return a page with two groups of two machines; one group is restarting."""
    rate = 78.0 + 8.0 * random.Random(int(now)).random()
    load = PageLoad(running=3, waiting=0, tokens_per_second=round(rate, 1), prompt_tokens_per_second=1210.0)
    deployment = PageDeployment(
        **{"key": "flash", "phase": "Degraded", "ready": 1, "wanted": 2, "models": ("deepseek-v4-flash",)},
        dashboard="http://127.0.0.1:8265",
        requests=PageRequests(active=5, held=2, held_bytes=48_211, replayed=5, continued=3, ok=10_412, total=10_420),
    )
    groups = serving(0, now, load=load), restarting(1, now)
    return StatusPage(source="gateway", time=now, deployments=(deployment,), groups=groups)


def fleet_page(now: float, count: int) -> StatusPage:
    """Return a page with `count` deployments of one group each; the fourth is restarting."""
    deployments, groups = [], []
    for number in range(count):
        key = f"team-{number % 7}/model-{number:03}"
        group = restarting(0, now, key) if number == 3 else serving(0, now, key)
        groups.append(group)
        phase, message = ("Recovering", "group 0 is being restarted in place") if number == 3 else ("Serving", "")
        ready = int(number != 3)
        requests = PageRequests(held=int(number == 3), ok=2000 + number, total=2000 + number)
        deployments.append(
            PageDeployment(key=key, phase=phase, message=message, ready=ready, wanted=1, requests=requests)
        )
    return StatusPage(source="operator", time=now, deployments=tuple(deployments), groups=tuple(groups))


class Site:
    """A server of the page and a browser; collects the errors that the browser reports."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self._browser = browser
        self._folder = folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/dsv4/status"
        self.problems: list[str] = []
        self.server: PageServer | None = None

    async def serve(self, make: Callable[[], StatusPage], *, seconds: float = 1.0) -> None:
        async def made() -> StatusPage:
            return make()

        keys = self._folder / "keys"
        keys.write_text(f"{KEY}\n", encoding="utf-8")
        self.server = PageServer(self._port, keys, made)
        self.server.feed = Feed(made, page_event, limit=8, seconds=seconds)
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close()
            self.server = None

    async def tab(self, *, width: int = 1280, height: int = 900, scheme: str = "light", key: str | None = KEY) -> Any:
        """Return a tab with the page open; with a `key`, signed in."""
        context = await self._browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": height}, timezone_id="UTC", locale="en-GB"
        )
        tab = await context.new_page()
        tab.on("console", lambda message: self._note(message.type, message.text))
        tab.on("pageerror", lambda error: self._note("error", str(error)))
        await visit(tab, self.url)
        if key is not None:
            await self.sign_in(tab, key)
            await tab.wait_for_selector("#page:not([hidden]) .group")
        return tab

    async def sign_in(self, tab: Any, key: str) -> None:
        await tab.fill("#key", key)
        await tab.press("#key", "Enter")

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not network_changed(text):
            self.problems.append(text)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with chromium() as browser:
        found = Site(browser, tmp_path)
        try:
            yield found
        finally:
            await found.stop()


async def fits(tab: Any) -> bool:
    """Return whether the page fits without horizontal scrolling."""
    return bool(await tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


async def axe(tab: Any) -> list[str]:
    """Return the findings of axe-core with serious or critical impact."""
    from axe_playwright_python.async_playwright import Axe

    found = await Axe().run(tab)
    return [
        f"{one['id']}: {one['nodes'][0]['html']}"
        for one in found.response["violations"]
        if one["impact"] in ("serious", "critical")
    ]


async def picture(tab: Any, name: str) -> None:
    """Write a picture for the documentation if `DSV4_SCREENSHOTS` requests it; each picture is below 150 kB."""
    if os.environ.get("DSV4_SCREENSHOTS") == "write":
        await tab.screenshot(path=IMAGES / name)
    assert (IMAGES / name).stat().st_size < 150_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_renders_quickly_fits_a_phone_and_is_accessible(site: Site, scheme: str) -> None:
    now = time.time()
    await site.serve(lambda: gateway_page(now + (time.time() - now)))
    tab = await site.tab(scheme=scheme, key=None)
    assert await axe(tab) == []
    await site.sign_in(tab, KEY)
    await tab.wait_for_selector("#page:not([hidden]) .group")
    assert await axe(tab) == []
    assert await fits(tab)
    paints = []
    # The best of several attempts, for a busy machine.
    while len(paints) < 20 and min(paints, default=math.inf) > FIRST_PAINT_MS:
        await reload(tab)
        await tab.wait_for_selector("#page:not([hidden]) .group")
        entries = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        paints.append(float(await tab.evaluate(entries)))
    print(f"first contentful paint: {sorted(paints)} ms")
    assert min(paints) <= FIRST_PAINT_MS
    await until(tab, "document.querySelectorAll('svg.spark').length > 0")
    await asyncio.sleep(4.0)
    await tab.locator(".group > summary").first.click()
    await tab.set_viewport_size({"width": 1100, "height": 1080})
    await picture(tab, f"status-{scheme}.png")
    await tab.set_viewport_size({"width": 360, "height": 740})
    assert await fits(tab)
    assert await axe(tab) == []
    if scheme == "dark":
        await picture(tab, "status-phone.png")
    assert site.problems == []


async def test_a_fleet_is_used_by_keyboard(site: Site) -> None:
    await site.serve(lambda: fleet_page(time.time(), 40))
    tab = await site.tab()
    assert await tab.locator(".group").count() == 40
    assert await tab.locator(".group[open]").count() == 0
    assert await axe(tab) == []
    await picture(tab, "status-fleet.png")

    async def focused() -> str:
        return str(await tab.evaluate("document.activeElement.id || document.activeElement.tagName"))

    # A reloaded document has its focus at the beginning.
    await reload(tab)
    await tab.wait_for_selector("#page:not([hidden]) .group")
    order = []
    for _ in range(6):
        await tab.keyboard.press("Tab")
        order.append(await focused())
    assert order == ["A", "leave", "filter", "problems", "SUMMARY", "SUMMARY"]
    # An element opened by keyboard stays open and focused while its figures change.
    await tab.keyboard.press("Enter")
    await tab.wait_for_selector(".group[open] .members")
    await asyncio.sleep(2.2)
    assert (await focused(), await tab.locator(".group[open]").count()) == ("SUMMARY", 1)
    await tab.focus("#problems")
    await tab.keyboard.press("Space")
    await until(tab, "document.querySelectorAll('.group').length === 1")
    assert "1 of 40 groups" in await tab.inner_text("#count")
    await tab.keyboard.press("Space")
    await tab.fill("#filter", "MODEL-01")
    await until(tab, "document.querySelectorAll('.group').length === 10")
    assert site.problems == []


async def test_the_key_stays_in_the_tab_and_out_of_addresses(site: Site) -> None:
    await site.serve(lambda: gateway_page(time.time()))
    addresses: list[str] = []
    tab = await site.tab(key=None)
    tab.on("request", lambda request: addresses.append(request.url))
    await site.sign_in(tab, "wrong")
    await tab.wait_for_selector("#refusal:not(:empty)")
    # Browsers log refused requests as errors.
    assert len(site.problems) == 1
    site.problems.clear()
    assert await tab.evaluate("document.activeElement.id") == "key"
    await site.sign_in(tab, KEY)
    await tab.wait_for_selector("#page:not([hidden]) .group")
    assert await tab.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    await reload(tab)
    await tab.wait_for_selector("#page:not([hidden]) .group")
    assert all(url.split("/dsv4/status")[1] in ("", "/events") for url in addresses)
    await tab.click("#leave")
    await tab.wait_for_selector("#login:not([hidden])")
    assert await tab.evaluate("sessionStorage.length") == 0
    assert not await tab.is_visible("#page")
    assert site.problems == []


async def test_it_connects_again_when_the_server_is_back(site: Site) -> None:
    await site.serve(lambda: gateway_page(time.time()))
    tab = await site.tab()
    await tab.wait_for_selector("#link.live")
    await site.stop()
    await tab.wait_for_selector("#link.lost")
    assert await tab.locator(".group").count() == 2
    changed = restarting(0, time.time())
    await site.serve(lambda: gateway_page(time.time()).model_copy(update={"groups": (changed,)}))
    await tab.wait_for_selector("#link.live", timeout=20_000)
    await until(tab, "document.querySelectorAll('.group').length === 1")
    site.problems.clear()


def hostile(source: random.Random) -> str:
    """Return text of a log or name that would be markup, script or style if it were not escaped."""
    parts = [
        "<img src=x onerror=canary()>",
        "<script>canary()</script>",
        '"><svg onload=canary()>',
        "</style>",
        "</pre>",
    ]
    parts += [
        "javascript:canary()",
        "{{7*7}}",
        "${canary()}",
        "\u202e",
        "\0",
        "&lt;b&gt;",
        "' onfocus=canary() autofocus='",
    ]
    noise = "".join(source.choices(string.printable + "äß漢😀", k=source.randrange(30)))
    return noise + source.choice(parts) + source.choice(parts)


async def test_no_text_becomes_markup(site: Site) -> None:
    source = random.Random(7)
    texts: list[str] = []

    def text() -> str:
        texts.append(hostile(source))
        return texts[-1]

    def page() -> StatusPage:
        now = time.time()
        member = PageMember(rank=0, node=text(), phase=text(), message=text(), warnings=(text(), text()))
        failure = hang(now - 5, node=text(), message=text(), detected_by=text(), evidence=text())
        provider = ProviderStatus(provider=text(), excluded=text())
        kernel = KernelStatus(op=text(), provider=text(), note=text(), standings=(provider,))
        verdict = PageVerdict(health=Health.DEAD, message=text())
        group = PageGroup(
            **{
                "deployment": "d",
                "index": 0,
                "phase": text(),
                "message": text(),
                "verdict": verdict,
                "memory": {text(): 1},
            },
            **{"members": (member,), "kernels": (kernel,), "failures": (failure,)},
        )
        deployment = PageDeployment(
            key="d",
            phase=text(),
            message=text(),
            models=(text(),),
            endpoint=text(),
            dashboard=source.choice(("javascript:canary()", text())),
        )
        return StatusPage(source="gateway", time=now, deployments=(deployment,), groups=(group,))

    await site.serve(page, seconds=0.05)
    tab = await site.tab(key=None)
    await tab.evaluate("window.canary = () => { window.executed = true; }; null")
    elements = await tab.evaluate("[...document.querySelectorAll('script, style, img, iframe, object, link')].length")
    await site.sign_in(tab, KEY)
    await tab.wait_for_selector("#page:not([hidden]) .group")
    async with asyncio.timeout(60):
        while len(texts) <= 300:
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    found = "[...document.querySelectorAll('script, style, img, iframe, object, link')].length"
    assert await tab.evaluate(found) == elements
    assert (
        await tab.evaluate("[...document.querySelectorAll('b b, [onerror], [onload], [onfocus], [autofocus]')].length")
        == 0
    )
    assert await tab.evaluate("[...document.links].every((one) => /^https?:/.test(one.href))")
    assert await tab.evaluate("window.executed") is None
    shown = await tab.inner_text("body")
    assert any(part in shown for part in ("<img src=x onerror=canary()>", "<script>canary()</script>"))
    assert site.problems == []


class Day:
    """100 groups for 24 simulated hours in steps of 10 s: each hangs once an hour on average, and recovers."""

    STEP = 10.0
    STEPS = int(24 * HOUR / STEP)

    def __init__(self) -> None:
        self._random = random.Random(1)
        self._now = time.time() - 24 * HOUR
        self._page = fleet_page(self._now, 100)
        self.steps = 0

    def make(self) -> StatusPage:
        if self.steps >= self.STEPS:
            return self._page
        self.steps += 1
        self._now += self.STEP
        groups = list(self._page.groups)
        for index, group in enumerate(groups):
            if group.phase == "Restarting" and self._random.random() < 0.2:
                last = group.failures[-1]
                ended = last.model_copy(update={"recover_seconds": self._now - last.time})
                fields = {"ready_since": self._now, "failures": (*group.failures[:-1], ended)}
                groups[index] = serving(0, self._now, group.deployment, generation=group.generation + 1, **fields)
            elif group.phase == "Serving" and self._random.random() < self.STEP / HOUR:
                failures = (*group.failures, hang(self._now, generation=group.generation))[-10:]
                groups[index] = restarting(0, self._now, group.deployment).model_copy(update={"failures": failures})
        self._page = self._page.model_copy(update={"time": self._now, "groups": tuple(groups)})
        return self._page


async def test_a_day_of_a_hundred_groups_needs_little_memory(site: Site) -> None:
    day = Day()
    await site.serve(day.make, seconds=0.002)
    tab = await site.tab()
    for index in range(0, 100, 10):
        await tab.locator(".group > summary").nth(index).click()

    async def heap() -> int:
        return int(await tab.evaluate("gc(), performance.memory.usedJSHeapSize"))

    sizes = []
    begun = time.monotonic()
    for share in (0.25, 0.5, 1.0):
        async with asyncio.timeout(180):
            while day.steps < share * day.STEPS:
                await asyncio.sleep(0.1)
        sizes.append(await heap())
    shown = f"{[round(size / 2**20, 1) for size in sizes]} MiB after 6, 12 and 24 hours"
    print(f"heap: {shown}; {day.steps} steps in {time.monotonic() - begun:.0f} s")
    assert max(sizes) <= HEAP_BYTES
    # The heap does not grow.
    assert sizes[2] - sizes[1] <= 2 * 2**20
    assert await tab.locator(".timeline > li").count() == 100
    assert site.problems == []
