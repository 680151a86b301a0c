"""One broken input, then the death of a member: it is handled as fast as ever, whatever was broken."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_operator.api import InvalidDeployment, parse
from dsv4_testkit.pods_world import World

HANDLED_SECONDS = 6.0
"""From the death of a member, or from the end of the failure that it needs, to the members of the next incarnation."""
CASES = 250
"""Of each object, chosen at random but always the same ones."""

MISSING = object()
JUNK: tuple[Any, ...] = (
    MISSING, None, "", "junk value!", "\x00", "-1", 0, -1, 2**70, 1e300, True, [], ["junk"], [{}], [None], {}, {"j": 1},
)  # fmt: skip

Path = tuple[str | int, ...]


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every field of `value`, with all its parts."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from paths(one, (*at, name))


def broken(value: Any, path: Path, junk: Any) -> Any:
    """A copy of `value` with `junk` at `path`."""
    made = copy.deepcopy(value)
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
        parse(copy.deepcopy(manifest))
    except InvalidDeployment:
        return True
    except Exception:
        return True
    return False


async def handled(world: World, what: object, seconds: float = HANDLED_SECONDS) -> None:
    """A member dies; the next incarnation has its members in time."""
    first = min((int(one["metadata"]["name"].split("-i")[1].split("-")[0]) for one in world.pods()), default=0)
    if len(world.pods(1)) == 2 and first == 1:
        world.end(1, 1)
    try:
        await world.until(lambda: not world.pods(1) and len(world.pods()) == 2, seconds)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


async def each(monkeypatch: pytest.MonkeyPatch, count: int, pick: Any) -> None:
    """Break one field at a time of the object that `pick` returns from a world that serves."""
    world = World(monkeypatch)
    await world.serve()
    chosen = cases(pick(world), count)
    await world.close()
    assert len(chosen) > 20
    for path, junk in chosen:
        world = World(monkeypatch)
        await world.serve()
        yield_to = pick.put(world, path, junk)
        if yield_to:
            for _ in range(2):
                await world.step()
            await handled(world, (path, junk))
        await world.close()


class Specification:
    """What a user changed, or a stricter rule refuses."""

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
    """What somebody else wrote over the status."""

    def __call__(self, world: World) -> Any:
        return {"status": world.live()["status"]}

    def put(self, world: World, path: Path, junk: Any) -> bool:
        world.put(broken(world.live(), path, junk))
        return True


class Pod:
    """A member's pod, of which somebody changed or added something."""

    def __init__(self, rank: int) -> None:
        self.name = "Pod", "team", f"nano-0-i1-r{rank}"

    def __call__(self, world: World) -> Any:
        pod = copy.deepcopy(world.kube.objects[self.name])
        # Their names and uids are how the API server finds objects.
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
    """An object that the deployment owns."""

    def __init__(self, kind: str, name: str) -> None:
        self.name = kind, "team", name

    def __call__(self, world: World) -> Any:
        found = copy.deepcopy(world.kube.objects[self.name])
        for field in ("name", "namespace", "uid", "resourceVersion"):
            found["metadata"].pop(field, None)
        return {key: value for key, value in found.items() if key not in ("apiVersion", "kind")}

    def put(self, world: World, path: Path, junk: Any) -> bool:
        made = broken(world.kube.objects[self.name], path, junk)
        if not isinstance(made["metadata"], dict):
            return False
        made["metadata"] |= {"name": self.name[2], "namespace": "team"}
        world.kube._put(self.name, made)
        return True


class Node(Owned):
    """A node that a member runs on; others are free."""

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
        Owned("ConfigMap", "nano-0-i1"),
        Owned("Deployment", "nano-0-gateway"),
    ],
    ids=["specification", "status", "head", "worker", "node", "service", "head-service", "plan", "gateway"],
)
async def test_a_broken_field_does_not_keep_a_death_from_being_handled(
    monkeypatch: pytest.MonkeyPatch, pick: Any
) -> None:
    await each(monkeypatch, CASES, pick)
