"""State of the cache after listings and events, in every order in which a server may send them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dsv4_operator.builders.names import MEMBER
from dsv4_operator.builders.names import labels as labels_of
from dsv4_operator.kube import DEPLOYMENTS, PODS, SERVICES, OwnedCache, PodCache, Resource, Unavailable
from dsv4_operator.kube.cache import Cache
from dsv4_operator.kube.client import Listing, WatchEvent
from dsv4_operator.kube.resources import Gone

Step = WatchEvent | Exception | None


def pod(name: str, version: int, group: int = 0, namespace: str = "a") -> dict[str, Any]:
    labels = labels_of("d", component=MEMBER, group=group)
    return {"metadata": {"name": name, "namespace": namespace, "resourceVersion": str(version), "labels": labels}}


class Script:
    """Scripted API client: returns the prepared listings and watches, and records the resource versions of watches."""

    def __init__(self, listings: list[list[dict[str, Any]] | Exception], watches: list[list[Step]]) -> None:
        self.listings, self.watches = listings, watches
        self.watched_from: list[str] = []
        self.over = asyncio.Event()

    async def listing(self, _resource: object, _namespace: object, **_: object) -> Listing:
        answer = self.listings.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Listing(answer, "100")

    async def watch(self, *_: object, resource_version: str, **__: object) -> AsyncIterator[WatchEvent]:
        self.watched_from.append(resource_version)
        if not self.watches:
            self.over.set()
            await asyncio.Event().wait()
        for step in self.watches.pop(0):
            if isinstance(step, Exception):
                raise step
            if step is not None:
                yield step


async def followed(script: Script, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[PodCache, list[Any]]:
    """Return a cache that has processed the whole script, and the keys that it reported as changed."""
    real = asyncio.sleep

    async def soon(_seconds: float) -> None:
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", soon)
    told: list[Any] = []
    cache = PodCache(script, changed=told.append, **options)  # type: ignore[arg-type]
    task = asyncio.create_task(cache.run())
    await asyncio.wait_for(script.over.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return cache, told


def names(cache: PodCache, group: int = 0, namespace: str = "a") -> set[str]:
    return {found["metadata"]["name"] for found in cache.pods(namespace, "d", group)}


async def test_objects_come_change_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(
        [[pod("x", 1), pod("y", 2)]],
        [
            [
                WatchEvent("ADDED", pod("z", 101, group=1)),
                WatchEvent("MODIFIED", pod("y", 102)),
                WatchEvent("DELETED", pod("x", 103)),
                WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": "110"}}),
            ]
        ],
    )
    cache, told = await followed(script, monkeypatch)
    assert names(cache) == {"y"}
    assert names(cache, group=1) == {"z"}
    assert told == [("a", "d", 0), ("a", "d", 0), ("a", "d", 1), ("a", "d", 0), ("a", "d", 0)]
    # The stream ended without an error, so the next watch starts at the bookmark.
    assert script.watched_from == ["100", "110"]
    await asyncio.wait_for(cache.synced(), 5)


async def test_objects_deleted_during_an_interrupted_watch_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([[pod("x", 1), pod("y", 2)], [pod("y", 2), pod("z", 3)]], [[Gone("too old")]])
    cache, told = await followed(script, monkeypatch)
    assert names(cache) == {"y", "z"}
    # y did not change, so it is not reported.
    assert len(told) == 4
    assert script.watched_from == ["100", "100"]


async def test_a_broken_stream_goes_on_where_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[Step] = [WatchEvent("ADDED", pod("z", 101)), Unavailable("cut")]
    script = Script([Unavailable("not yet"), [pod("x", 1)]], [broken])
    cache, _ = await followed(script, monkeypatch)
    assert names(cache) == {"x", "z"}
    assert script.watched_from == ["100", "101"]


@pytest.mark.parametrize("error", [ValueError("no JSON"), KeyError("metadata"), TypeError("None")])
async def test_an_answer_that_cannot_be_read_does_not_end_the_cache(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    script = Script([error, [pod("p", 1)], [pod("p", 2)]], [[WatchEvent("ADDED", pod("q", 5)), error]])
    cache, _ = await followed(script, monkeypatch)
    # Listed again, because events may have been missed.
    assert names(cache) == {"p"}
    assert script.watched_from == ["100", "100"]


async def test_an_object_is_found_under_its_present_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([[pod("x", 1)]], [[WatchEvent("MODIFIED", pod("x", 101, group=2))]])
    cache, told = await followed(script, monkeypatch)
    assert names(cache) == set()
    assert names(cache, group=2) == {"x"}
    assert told[-2:] == [("a", "d", 0), ("a", "d", 2)]


async def test_a_member_is_found_by_its_name_and_owner_with_any_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = pod("d-0-i1-r0", 1)
    bare["metadata"] |= {"labels": {}, "ownerReferences": [{"kind": "DSV4Deployment", "name": "d"}]}
    foreign = pod("d-0-i1-r1", 2)
    foreign["metadata"] |= {"labels": {}, "ownerReferences": [{"kind": "DSV4Deployment", "name": "e"}]}
    cache, _ = await followed(Script([[bare, foreign]], []), monkeypatch)
    assert names(cache) == {"d-0-i1-r0"}


async def test_namespaces_are_listed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    both: list[list[dict[str, Any]] | Exception] = [[pod("x", 1)], [pod("x", 1, namespace="b")]]
    cache, _ = await followed(Script(both, []), monkeypatch, namespaces=("a", "b"))
    assert names(cache) == names(cache, namespace="b") == {"x"}
    assert len(list(cache.all())) == 2


def program(name: str, version: int, phase: str = "Running") -> dict[str, Any]:
    """Return a pod that does not belong to a deployment."""
    container = {"name": "c", "image": "i", "env": [{"name": "A"}] * 100, "resources": {"requests": {"cpu": "1"}}}
    return {
        "metadata": {"name": name, "namespace": "a", "uid": name, "resourceVersion": str(version), "annotations": {}},
        "spec": {"nodeName": "n", "containers": [container], "volumes": [{}]},
        "status": {"phase": phase, "podIP": "10.0.0.1"},
    }


async def test_only_the_resource_usage_of_other_programs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Step] = [
        WatchEvent("ADDED", program("z", 101)),
        WatchEvent("MODIFIED", program("y", 102, "Succeeded")),
    ]
    script = Script([[pod("x", 1), program("y", 2), program("done", 3, "Failed")]], [steps])
    cache, told = await followed(script, monkeypatch)
    assert told == [("a", "d", 0)], "nobody has to look for these"
    kept = {one["metadata"]["name"]: one for one in cache.all()}
    assert set(kept) == {"x", "z"}
    assert kept["z"] == {
        "metadata": {"name": "z", "namespace": "a", "uid": "z", "resourceVersion": "101"},
        "spec": {
            "nodeName": "n",
            "containers": [{"resources": {"requests": {"cpu": "1"}}}],
            "initContainers": [],
        },
        "status": {"phase": "Running"},
    }


@pytest.mark.parametrize("ending", [None, Gone("too old"), Unavailable("cut")])
async def test_watches_that_end_at_once_are_opened_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch, ending: Exception | None
) -> None:
    pauses: list[float] = []
    real = asyncio.sleep

    async def soon(seconds: float) -> None:
        pauses.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", soon)
    script = Script([[] for _ in range(20)], [[ending] for _ in range(9)])
    task = asyncio.create_task(PodCache(script).run())  # type: ignore[arg-type]
    await asyncio.wait_for(script.over.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    # The first watch is opened again at once, because servers end watches every few minutes.
    wanted = [1, 2, 4, 8, 8, 8, 8, 8]
    assert [pytest.approx(pause, rel=0.21) for pause in wanted] == pauses


async def test_a_watch_that_lasted_is_opened_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 40.0
        return now

    async def never(_seconds: float) -> None:
        raise AssertionError("nobody has to wait")

    script = Script([[]], [[None]] * 5)
    cache = Cache(script, PODS, lambda _: "", clock=clock)  # type: ignore[arg-type]
    monkeypatch.setattr(asyncio, "sleep", never)
    task = asyncio.create_task(cache.run())
    await asyncio.wait_for(script.over.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(script.watched_from) == 6


async def test_a_namespace_that_is_named_twice_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = await followed(Script([[pod("x", 1)]], []), monkeypatch, namespaces=("a", "a"))
    await asyncio.wait_for(cache.synced(), 5)
    assert names(cache) == {"x"}


def gateway(version: int, **changes: Any) -> dict[str, Any]:
    about = {"namespace": "a", "name": "d-0-gateway", "labels": labels_of("d"), "generation": 1}
    about |= {"resourceVersion": str(version), "uid": "u", "managedFields": [{"manager": "m"}]}
    return {"metadata": about, "spec": {"replicas": 2}, "status": {"replicas": version}, **changes}


async def test_owned_objects_are_kept_with_their_managers_and_reported_without_changes_of_their_status() -> None:
    told: list[Any] = []
    shown, seen = asyncio.Queue[WatchEvent](), asyncio.Event()

    class Server:
        async def listing(self, resource: Resource, _namespace: object, **_: object) -> Listing:
            return Listing([gateway(1)] if resource is DEPLOYMENTS else [], "1")

        async def watch(self, resource: Resource, *_: object, **__: object) -> AsyncIterator[WatchEvent]:
            while True:
                if resource is not DEPLOYMENTS:
                    await asyncio.Event().wait()
                if shown.empty():
                    seen.set()
                yield await shown.get()

    async def processed(event: WatchEvent) -> None:
        seen.clear()
        shown.put_nowait(event)
        await seen.wait()

    cache = OwnedCache(Server(), changed=told.append)  # type: ignore[arg-type]
    task = asyncio.create_task(cache.run())
    await cache.listed(None)
    await seen.wait()
    found = cache.find(DEPLOYMENTS, "a", "d-0-gateway")
    assert found == {"apiVersion": "apps/v1", "kind": "Deployment", **gateway(1, status=None)}
    assert cache.find(DEPLOYMENTS, "b", "d-0-gateway") is cache.find(SERVICES, "a", "d-0-gateway") is None
    assert cache.find(PODS, "a", "d-0-gateway") is None, "a kind that is not watched"
    assert told == [("a", "d")]
    versions = cache.versions("a", "d")
    await processed(WatchEvent("MODIFIED", gateway(2)))
    assert (told, cache.versions("a", "d")) == ([("a", "d")], versions)
    changed = gateway(3, spec={"replicas": 7})
    changed["metadata"]["generation"] = 2
    await processed(WatchEvent("MODIFIED", changed))
    assert told == [("a", "d")] * 2
    found = cache.find(DEPLOYMENTS, "a", "d-0-gateway")
    assert found is not None
    assert found["spec"] == {"replicas": 7}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
