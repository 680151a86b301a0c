"""The groups of the deployment, and which of them a request goes to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from dsv4_runtime.contract.gateway import GroupRoute
from dsv4_runtime.gateway.engine import Availability, EngineView, Life
from dsv4_runtime.gateway.errors import RefusedError, given_up_refusal
from dsv4_runtime.gateway.route import RouteFile
from dsv4_runtime.gateway.watch import Watch

_LOOK_SECONDS = 0.5
"""Between looks whether the route's file is another one."""


class RoutedGroup:
    """One group as this gateway sees it."""

    def __init__(self, route: GroupRoute, routes: RouteFile, engine: EngineView) -> None:
        self.index, self.api, self.engine = route.group, route.api, engine
        self.place = route.agent, route.api
        self.watch = Watch(route, routes, engine)
        self._task = asyncio.create_task(self.watch.run())

    @property
    def auth(self) -> Mapping[str, str]:
        """Return the headers that open vLLM's port."""
        return self.watch.auth

    async def end(self) -> None:
        """End the watch, and whatever waits for the engine."""
        self._task.cancel()
        await asyncio.wait({self._task})
        self.engine.leave()


class Groups:
    """Every group of the deployment; follows the route's file."""

    def __init__(self, routes: RouteFile) -> None:
        self.routes = routes
        self.all: dict[int, RoutedGroup] = {}
        """By their index, this gateway's own first."""
        self._settled = asyncio.Event()
        """Set while nobody has reason to wait."""
        self.died: Callable[[Life, bool], None] = lambda life, reported: None
        """See `EngineView`."""

    async def run(self) -> None:
        """Watch every group until cancelled."""
        try:
            await self._apply()
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                if self.routes.changed():
                    await self._apply()
        finally:
            await asyncio.gather(*(group.end() for group in self.all.values()))

    def pick(self, admits: Callable[[RoutedGroup], bool] | None = None) -> tuple[RoutedGroup, Life] | None:
        """Return the group that a request goes to now and the life of its engine; None: no engine takes it now.

        The one that answers fewest requests of this gateway; among equals its own, whose caches know its clients.
        `admits` tells which groups the request may go to; None: to all.
        """
        found: tuple[RoutedGroup, Life] | None = None
        for group in self.all.values():
            life = group.engine.present
            if life is not None and (found is None or life.open < found[1].open) and (admits is None or admits(group)):
                found = group, life
        return found

    async def available(
        self, admits: Callable[[RoutedGroup], bool] | None = None, changed: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[RoutedGroup, Life]:
        """Return what `pick` does, once there is such a group; `changed` waits until `admits` may change.

        Raises:
            RefusedError: every group was given up.
        """
        while (found := self.pick(admits)) is None:
            if (reason := self.given_up) is not None:
                raise RefusedError(given_up_refusal(reason))
            if changed is not None and self.pick() is not None:
                await changed()
            else:
                await self._settled.wait()
        return found

    @property
    def state(self) -> Availability:
        """Return the best state of an engine."""
        states = {group.engine.state for group in self.all.values()}
        return next((state for state in Availability if state in states), Availability.AWAY)

    @property
    def refusal(self) -> str | None:
        """Return why agents reject this gateway's credentials; None: one accepts them, or none was reached yet."""
        watches = [group.watch for group in self.all.values()]
        if any(watch.connected for watch in watches):
            return None
        return next((watch.refusal for watch in watches if watch.refusal is not None), None)

    @property
    def given_up(self) -> str | None:
        """Return why no group will come back by itself; None: one may."""
        reasons = [group.engine.given_up for group in self.all.values()]
        return reasons[0] if reasons and None not in reasons else None

    async def _apply(self) -> None:
        before, self.all = self.all, {}
        for route in self.routes.route.groups:
            known = before.get(route.group)
            if known is not None and known.place == (route.agent, route.api):
                self.all[route.group] = before.pop(route.group)
            else:
                self.all[route.group] = RoutedGroup(route, self.routes, self._engine(route.group))
            self.all[route.group].engine.give_up(route.given_up)
        # Before anybody else has a turn: who finds no engine, and that nobody has to wait for one, would ask for ever.
        self._changed()
        await asyncio.gather(*(group.end() for group in before.values()))

    def _engine(self, group: int) -> EngineView:
        return EngineView(self._changed, group, lambda life, reported: self.died(life, reported))

    def _changed(self) -> None:
        if self.state is Availability.HEALTHY or self.given_up is not None:
            self._settled.set()
        else:
            self._settled.clear()
