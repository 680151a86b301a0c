"""The client on a real API server: the effect of each verb, and the error for each refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clusterkit.client import Cluster as ControlPlane

from dsv4_operator.builders.member import removal_of
from dsv4_operator.controller import watching
from dsv4_operator.controller.watching import DeploymentWatch
from dsv4_operator.kube import (
    CONFIG_MAPS,
    DSV4_DEPLOYMENTS,
    PODS,
    Access,
    AlreadyExists,
    Client,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Unavailable,
    client,
    find_access,
)
from dsv4_operator.kube.access import Credential
from dsv4_operator.kube.cache import Cache


@pytest.fixture
async def kube(cluster: ControlPlane) -> AsyncIterator[Client]:
    async with Client(find_access(kubeconfig=cluster.kubeconfig)) as found:
        yield found


def config(namespace: str, name: str, **data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": {"for": "test"}},
        "data": data,
    }


async def test_objects_are_made_changed_and_removed(kube: Client, namespace: str) -> None:
    assert await kube.get(CONFIG_MAPS, namespace, "a") is None
    made = await kube.create(config(namespace, "a", one="1"))
    with pytest.raises(AlreadyExists, match='configmaps "a" already exists'):
        await kube.create(config(namespace, "a"))
    applied = await kube.apply(config(namespace, "a", one="2", two="2"))
    assert applied["data"] == {"one": "2", "two": "2"}
    patched = await kube.patch(CONFIG_MAPS, namespace, "a", {"data": {"one": None, "three": "3"}})
    assert patched["data"] == {"two": "2", "three": "3"}
    with pytest.raises(Conflict):
        await kube.replace(made | {"data": {}})
    replaced = await kube.replace(patched | {"data": {"only": "x"}})
    assert replaced["data"] == {"only": "x"}
    with pytest.raises(Conflict):
        await kube.delete(CONFIG_MAPS, namespace, "a", uid="that-of-another")
    await kube.delete(CONFIG_MAPS, namespace, "a", uid=made["metadata"]["uid"])
    await kube.delete(CONFIG_MAPS, namespace, "a")
    with pytest.raises(NotFound):
        await kube.patch(CONFIG_MAPS, namespace, "a", {"data": {}})
    again = await kube.apply(config(namespace, "a"))
    assert again["metadata"]["uid"] != made["metadata"]["uid"]
    with pytest.raises((Conflict, Invalid)):
        await kube.patch(CONFIG_MAPS, namespace, "a", {"metadata": {"uid": made["metadata"]["uid"]}})


async def test_applying_the_same_again_changes_nothing(kube: Client, namespace: str) -> None:
    first = await kube.apply(config(namespace, "a", one="1"))
    again = await kube.apply(config(namespace, "a", one="1"))
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_a_status_is_replaced_without_the_rest(kube: Client, namespace: str, definition: object) -> None:
    nano = {"variant": "Nano", "source": {"nano": {"seed": 0}}}
    spec = {"model": nano, "topology": {"hardware": "CPU"}}
    about = {"name": "d", "namespace": namespace}
    kind = {"apiVersion": DSV4_DEPLOYMENTS.api_version, "kind": DSV4_DEPLOYMENTS.kind}
    made = await kube.create({**kind, "metadata": about, "spec": spec})
    version = {field: made["metadata"][field] for field in ("name", "namespace", "uid", "resourceVersion")}
    written = await kube.replace({**kind, "metadata": version, "status": {"phase": "Pending"}}, subresource="status")
    assert (written["spec"], written["status"]) == (made["spec"], {"phase": "Pending"})
    assert written["metadata"]["generation"] == made["metadata"]["generation"]
    for wrong in (version, version | {"resourceVersion": written["metadata"]["resourceVersion"], "uid": "another"}):
        with pytest.raises(Conflict):
            await kube.replace({**kind, "metadata": wrong, "status": {"phase": "Failed"}}, subresource="status")


async def test_refusals_have_their_kind_and_the_servers_words(
    cluster: ControlPlane, kube: Client, namespace: str
) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": namespace}, "spec": {}}
    with pytest.raises(Invalid, match=r"spec.containers: Required value"):
        await kube.create(pod)
    nobody = replace(kube.access, credential=Credential(token="made-up"))
    async with Client(nobody) as stranger:
        with pytest.raises(Forbidden, match="401"):
            await stranger.list(PODS, namespace)
    async with Client(replace(kube.access, authority=None)) as distrustful:
        with pytest.raises(Unavailable, match="certificate verify failed"):
            await distrustful.list(PODS, namespace)
    async with Client(Access("https://127.0.0.1:1")) as lost:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await lost.list(PODS, namespace)


async def test_a_guard_keeps_from_writing_and_not_from_reading(
    kube: Client, namespace: str, cluster: ControlPlane
) -> None:
    def no() -> None:
        raise Conflict("not now")

    told: list[tuple[str, int]] = []
    async with Client(kube.access, guard=no, on_answer=lambda *answer: told.append(answer)) as guarded:
        assert await guarded.list(PODS, namespace) == []
        with pytest.raises(Conflict, match="not now"):
            await guarded.create(config(namespace, "a"))
        with pytest.raises(Conflict, match="not now"):
            await guarded.delete(CONFIG_MAPS, namespace, "a")
    assert told == [("GET", 200)]
    assert await kube.get(CONFIG_MAPS, namespace, "a") is None


async def test_pages_are_put_together(kube: Client, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAGE", 3)
    for number in range(7):
        await kube.apply(config(namespace, f"c{number}"))
    found = await kube.list(CONFIG_MAPS, namespace, labels="for=test")
    assert sorted(one["metadata"]["name"] for one in found) == [f"c{number}" for number in range(7)]


async def test_a_watch_returns_every_event_with_lines_of_any_length(kube: Client, namespace: str) -> None:
    start = await kube.listing(CONFIG_MAPS, namespace, labels="for=test")
    long = "x" * 900_000
    await kube.create(config(namespace, "a", big=long))
    await kube.apply(config(namespace, "b"))
    await kube.patch(CONFIG_MAPS, namespace, "b", {"data": {"n": "1"}})
    await kube.delete(CONFIG_MAPS, namespace, "a")
    seen = []
    async with asyncio.timeout(60):
        async for event in kube.watch(
            CONFIG_MAPS, namespace, labels="for=test", resource_version=start.resource_version
        ):
            seen.append((event.type, event.object["metadata"]["name"]))
            if len(seen) == 4:
                break
    assert seen == [("ADDED", "a"), ("ADDED", "b"), ("MODIFIED", "b"), ("DELETED", "a")]


async def test_a_cache_follows_the_server(kube: Client, namespace: str) -> None:
    await kube.create(config(namespace, "early"))
    news = asyncio.Event()
    cache: Cache[str] = Cache(
        kube,
        CONFIG_MAPS,
        lambda item: str(item["metadata"]["namespace"]),
        namespaces=(namespace,),
        labels="for=test",
        changed=lambda _: news.set(),
    )
    task = asyncio.create_task(cache.run())

    async def until(*wanted: str) -> None:
        async with asyncio.timeout(60):
            while {one["metadata"]["name"] for one in cache.objects(namespace)} != set(wanted):
                news.clear()
                await news.wait()

    try:
        await until("early")
        assert cache.silence < 20
        await kube.create(config(namespace, "late"))
        await until("early", "late")
        await kube.delete(CONFIG_MAPS, namespace, "early")
        await until("late")
        assert "managedFields" not in cache.objects(namespace)[0]["metadata"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_changes_of_many_deployments_are_reported_at_once(
    kube: Client, namespace: str, definition: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any number of deployments: a change does not wait until the others are quiet."""
    # kopf keeps the state of an object without changes for longer than this test waits.
    kept = watching.watch_settings()
    kept.queueing.idle_timeout = 600
    monkeypatch.setattr(watching, "watch_settings", lambda: kept)
    heard, news = set[str](), asyncio.Event()

    def told(manifest: dict[str, Any], _gone: bool) -> None:
        heard.add(manifest["metadata"]["name"])
        news.set()

    async def create(name: str) -> None:
        spec = {"suspend": True, "model": {"variant": "Nano", "source": {"nano": {"seed": 0}}}}
        kind = {"apiVersion": DSV4_DEPLOYMENTS.api_version, "kind": DSV4_DEPLOYMENTS.kind}
        about = {"name": name, "namespace": namespace}
        await kube.create({**kind, "metadata": about, "spec": spec | {"topology": {"hardware": "CPU"}}})

    async def until(count: int) -> None:
        while len(heard) < count:
            news.clear()
            await news.wait()

    watch = DeploymentWatch(kube.access, namespace, told)
    watch.start()
    try:
        await create("first")
        await asyncio.wait_for(until(1), 60)
        await asyncio.gather(*(create(f"d{number}") for number in range(100)))
        await asyncio.wait_for(until(101), 60)
    finally:
        await watch.close()


async def test_a_token_that_was_replaced_is_read_again(
    cluster: ControlPlane, kube: Client, namespace: str, tmp_path: Path
) -> None:
    cluster.kubectl("-n", namespace, "create", "serviceaccount", "reader")
    cluster.kubectl(
        "-n", namespace, "create", "rolebinding", "reader", "--clusterrole=view", f"--serviceaccount={namespace}:reader"
    )
    token = cluster.kubectl("-n", namespace, "create", "token", "reader").strip()
    file = tmp_path / "token"
    file.write_text("one that has ended")
    async with Client(Access(kube.access.server, authority=kube.access.authority, token_file=file)) as reader:
        with pytest.raises(Forbidden, match="401"):
            await reader.list(PODS, namespace)
        file.write_text(token)
        assert await reader.list(PODS, namespace) == []
        with pytest.raises(Forbidden, match="403"):
            await reader.create(config(namespace, "a"))


@pytest.mark.parametrize(("evicted", "reason"), [(True, "EvictionByEvictionAPI: "), (False, None)])
async def test_an_evicted_pod_has_the_reason_for_its_removal(
    kube: Client, namespace: str, evicted: bool, reason: str | None
) -> None:
    """On a node that does not exist, so that nothing confirms its end."""
    spec = {"nodeName": "nowhere", "containers": [{"name": "agent", "image": "dsv4.test/none:1"}]}
    about = {"name": "member", "namespace": namespace}
    made = await kube.create({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec})
    assert removal_of(made) is None
    if evicted:
        await kube.evict(namespace, "member", uid=made["metadata"]["uid"])
    else:
        await kube.delete(PODS, namespace, "member")
    found = await kube.get(PODS, namespace, "member")
    assert found is not None
    assert found["metadata"].get("deletionTimestamp")
    removal = removal_of(found)
    assert (removal or "").startswith(reason or "")
    assert (removal is None) == (reason is None)
    await kube.delete(PODS, namespace, "member", grace_seconds=0)
