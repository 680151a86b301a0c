"""Recovery from a member's death takes no longer with one broken input, for every kind of input."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from dsv4_operator.api import InvalidDeployment, parse
from dsv4_operator.builders import names
from dsv4_operator.controller import reconcile
from dsv4_operator.kube.resources import error_of
from dsv4_operator.lifecycle.decide import QUIET_SECONDS
from dsv4_runtime.contract import AgentStatus
from dsv4_testkit.fake_kube import copied
from dsv4_testkit.pods_world import UID, World

HANDLED_SECONDS = 6.0
"""Limit from the death of a member, or from the end of a failing request, to the members of the next incarnation."""
CASES = 80
"""Number of cases for each object, a random selection with a fixed seed."""

MISSING = object()
JUNK: tuple[Any, ...] = (
    MISSING, None, "", "junk value!", "\x00", "-1", 0, -1, 2**70, 1e300, True, [], ["junk"], [{}], [None], {}, {"j": 1},
)  # fmt: skip

Path = tuple[str | int, ...]


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Yield the path of every field of `value`, at every depth."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from paths(one, (*at, name))


def broken(value: Any, path: Path, junk: Any) -> Any:
    """Return a copy of `value` with `junk` at `path`."""
    made = copied(value)
    holder = made
    for step in path[:-1]:
        holder = holder[step]
    if junk is MISSING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = junk
    return made


def cases(value: Any, count: int = CASES) -> list[tuple[Path, Any]]:
    every = list(itertools.product(paths(value), JUNK))
    return random.Random(1).sample(every, min(count, len(every)))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def invalid(manifest: dict[str, Any]) -> bool:
    try:
        parse(copied(manifest))
    except InvalidDeployment:
        return True
    except Exception:
        return True
    return False


async def handled(world: World, what: object, seconds: float = HANDLED_SECONDS) -> None:
    """End a member and require the members of the next incarnation within the limit."""
    if world.formed(1):
        world.end(1, 1)
    try:
        await world.until(lambda: not world.pods(1) and len(world.pods()) == 2, seconds)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


class Specification:
    """Specification changed by a user, or refused by a stricter rule."""

    def __call__(self, world: World) -> Any:
        return {
            "spec": world.live()["spec"],
            "metadata": {"annotations": {"dsv4.dev/restart-at": "x"}, "labels": {"a": "b"}},
        }

    def put(self, world: World, path: Path, junk: Any) -> bool:
        live = world.live()
        live["metadata"] |= {"annotations": {"dsv4.dev/restart-at": "x"}, "labels": {"a": "b"}}
        made = broken(live, path, junk)
        if not isinstance(made["metadata"], dict):
            return False
        made["metadata"] = {**live["metadata"], **made["metadata"], "generation": 2}
        if not invalid({key: value for key, value in made.items() if key != "status"}):
            return False
        world.put(made)
        return True


class Status:
    """Status replaced by another writer."""

    def __call__(self, world: World) -> Any:
        return {"status": world.live()["status"]}

    def put(self, world: World, path: Path, junk: Any) -> bool:
        world.put(broken(world.live(), path, junk))
        return True


class Pod:
    """Pod of a member with a changed or additional field."""

    def __init__(self, rank: int) -> None:
        self.name = "Pod", "team", f"nano-0-i1-r{rank}"

    def __call__(self, world: World) -> Any:
        pod = copied(world.kube.objects[self.name])
        # The API server identifies objects by name and UID.
        for field in ("name", "namespace", "uid", "resourceVersion"):
            pod["metadata"].pop(field)
        return {key: pod[key] for key in ("metadata", "spec", "status")}

    def put(self, world: World, path: Path, junk: Any) -> bool:
        pod = broken(world.kube.objects[self.name], path, junk)
        if not isinstance(pod["metadata"], dict):
            return False
        pod["metadata"] |= {"name": self.name[2], "namespace": "team"}
        world.kube._put(self.name, pod)
        return True


class Owned:
    """Object owned by the deployment."""

    def __init__(self, kind: str, name: str) -> None:
        self.name = kind, "team", name

    def __call__(self, world: World) -> Any:
        found = copied(world.kube.objects[self.name])
        for field in ("name", "namespace", "uid", "resourceVersion"):
            found["metadata"].pop(field, None)
        return {key: value for key, value in found.items() if key not in ("apiVersion", "kind")}

    def put(self, world: World, path: Path, junk: Any) -> bool:
        made = broken(world.kube.objects[self.name], path, junk)
        if not isinstance(made["metadata"], dict):
            return False
        if not names.belongs(made, UID):
            # Such an object belongs to another owner: it is reported and never changed.
            return False
        made["metadata"] |= {"name": self.name[2], "namespace": "team"}
        world.kube._put(self.name, made)
        return True


class Node(Owned):
    """Node of a member; other nodes are free."""

    def __init__(self) -> None:
        self.name = "Node", "", "n0"

    def put(self, world: World, path: Path, junk: Any) -> bool:
        made = broken(world.kube.objects[self.name], path, junk)
        if not isinstance(made["metadata"], dict):
            return False
        made["metadata"] |= {"name": "n0"}
        world.kube._put(self.name, made)
        return True


@pytest.mark.parametrize(
    "pick",
    [
        Specification(),
        Status(),
        Pod(0),
        Pod(1),
        Node(),
        Owned("Service", "nano"),
        Owned("Service", "nano-0-head"),
        Owned("ConfigMap", names.mounted_name("nano", UID, 0, 1)),
        Owned("Deployment", "nano-0-gateway"),
    ],
    ids=["specification", "status", "head", "worker", "node", "service", "head-service", "plan", "gateway"],
)
async def test_a_broken_field_does_not_keep_a_death_from_being_handled(
    monkeypatch: pytest.MonkeyPatch, pick: Any
) -> None:
    world = World(monkeypatch)
    await world.serve()
    chosen = cases(pick(world))
    await world.close()
    assert len(chosen) > 20
    for path, junk in chosen:
        world = World(monkeypatch)
        await world.serve()
        if pick.put(world, path, junk):
            for _ in range(2):
                await world.step()
            await handled(world, (path, junk))
        await world.close()


def reports(world: World) -> list[tuple[str, AgentStatus]]:
    """Return a sample of agents' reports, each with one field replaced by a value that its type allows."""
    found = []
    for known, report in world.reports.items():
        document = report.model_dump(mode="json", by_alias=True)
        engine = {"generation": 1, "readyTime": 1.0, "restarts": [1.0], "kvCacheTokens": 1, "memory": {"a": 1}}
        failure = {"time": 1.0, "cause": "EngineHung", "message": "m", "detectedBy": "x", "recoverSeconds": 1.0}
        document |= {"engine": {**engine, "kvConcurrency": 1.0, "memoryOf": "x", "failures": [failure]}}
        document |= {"signals": {"time": 1.0, "silent": {"0": 1.0, "1": 1.0}}, "progress": {"stage": "s", "percent": 1}}
        AgentStatus.model_validate(document)
        for path, junk in itertools.product(paths(document), (*JUNK, math.nan, math.inf, -math.inf, -1e300)):
            with contextlib.suppress(ValueError):
                found.append((known, AgentStatus.model_validate(broken(document, path, junk))))
    return random.Random(1).sample(found, min(CASES, len(found)))


async def test_a_broken_report_does_not_keep_a_death_from_being_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    await world.serve()
    chosen = reports(world)
    await world.close()
    for known, report in chosen:
        world = World(monkeypatch)
        await world.serve()
        world.reports[known] = report
        for _ in range(2):
            await world.step()
        assert world.condition("Progressing")[1] != "ActionFailed", report
        assert orjson.loads(orjson.dumps(world.status)) == world.status, "as the API server stores it"
        # Restarts of the engine in a report do not restart the group.
        await handled(world, report)
        await world.close()


NEEDED = [
    ("replace", "DSV4Deployment"),
    ("list", "Node"),
    ("list", "Pod"),
    ("delete", "Pod"),
    ("create", "Pod"),
    ("create", "ConfigMap"),
    ("delete", "ConfigMap"),
    ("create", "Secret"),
    ("delete", "Secret"),
    ("get", "Service"),
    ("apply", "Service"),
    ("delete", "Service"),
]
"""Requests that recovery from a death needs: verb and kind."""
OTHERS = [
    ("list", "ConfigMap"),
    ("apply", "ConfigMap"),
    ("create", "Deployment"),
    ("create", "NetworkPolicy"),
    ("create", "PodDisruptionBudget"),
]
ERRORS = [
    error_of("PUT /x", 403, "Forbidden", "exceeded quota: team"),
    error_of("PUT /x", 422, "Invalid", "field is immutable"),
    error_of("PUT /x", 503, "", "down"),
    ValueError("unexpected character"),
    TypeError("a defect"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}")
@pytest.mark.parametrize("request_", NEEDED, ids="-".join)
async def test_a_death_is_handled_as_soon_as_the_request_that_it_needs_succeeds(
    monkeypatch: pytest.MonkeyPatch, request_: tuple[str, str], error: Exception
) -> None:
    world = World(monkeypatch)
    await world.serve()
    # Data read before the failure is outdated when the failure ends.
    world.kube.failing[request_] = error
    world.end(1, 1)
    failed = world.now
    while world.now < failed + 30.0:
        assert await world.step() <= 15.0
    told = [event.message for event in world.events if str(event.reason) == "ActionFailed"]
    if isinstance(error, ValueError | TypeError):
        assert any("internal error" in message for message in told)
    else:
        assert any(str(error) in message for message in told), told
    if request_[0] != "replace":
        assert world.condition("Progressing")[:2] == ("True", "ActionFailed")
    world.kube.failing.clear()
    # The creation of members has the longest backoff of all requests that recovery needs.
    await handled(world, request_, 1.1 * reconcile._FORM_SECONDS + HANDLED_SECONDS)
    await world.until(lambda: world.condition("Progressing")[1] != "ActionFailed", 5.0)
    assert world.status["groups"][0]["totalRestarts"] == 1
    await world.close()


@pytest.mark.parametrize(
    ("request_", "how"),
    [*((one, "refused") for one in OTHERS), *((one, "hanging") for one in OTHERS if one[0] != "list")],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
async def test_no_other_request_delays_a_death(
    monkeypatch: pytest.MonkeyPatch, request_: tuple[str, str], how: str
) -> None:
    monkeypatch.setattr(reconcile, "_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(reconcile, "_EVIDENCE_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(reconcile, "_EVIDENCE_SECONDS", 0.05)
    world = World(monkeypatch)
    if how == "hanging":
        world.kube.hanging.add(request_)
    else:
        world.kube.failing[request_] = ERRORS[0]
    begun = time.monotonic()
    await world.serve()
    for _ in range(100):
        assert await world.step() <= QUIET_SECONDS + 0.1, "supervision goes on, and silence is an event"
        assert time.monotonic() - begun < 60, "no reconcile waits for it"
    await handled(world, request_)
    await world.close()
