"""The loop around the agent's decisions: it feeds events to `step`, runs the actions, and keeps the timer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from dsv4_runtime.agent.decide.actions import AgentAction
from dsv4_runtime.agent.decide.events import AgentEvent, Crashed, GroupSeen, Now, Task, TimerFired
from dsv4_runtime.agent.decide.member import due, step
from dsv4_runtime.agent.decide.state import MemberState
from dsv4_runtime.contract.clock import unix_time

_log = logging.getLogger(__name__)


class Loop:
    """One member's decisions, event by event. Made inside a running event loop."""

    def __init__(
        self,
        state: MemberState,
        run: Callable[[AgentAction], None],
        view: Callable[[], GroupSeen],
        awake: Callable[[float], float],
    ) -> None:
        """Args:
        state: to begin with.
        run: runs an action without waiting.
        view: looks at the group.
        awake: returns since when this agent has not stood still, given the monotonic time.
        """
        self.state = state
        self._run = run
        self._view = view
        self._awake = awake
        self._events: deque[AgentEvent] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, event: AgentEvent) -> None:
        """Handle an event, or leave it to the call that is handling one just now."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._busy = False
        self._wind()

    def close(self) -> None:
        """Wake no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, event: AgentEvent) -> None:
        try:
            self.state, actions = step(self.state, event, self._now())
            for action in actions:
                self._run(action)
        except Exception as error:
            _log.exception("the agent made a mistake")
            if not isinstance(event, Crashed):
                self._events.append(Crashed(f"{type(error).__name__}: {error}"))

    def _now(self) -> Now:
        clock = time.monotonic()
        return Now(clock, unix_time(), self._awake(clock))

    def _wind(self) -> None:
        self.close()
        at = due(self.state, self._now())
        if at is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._fire)

    def _fire(self) -> None:
        self.feed(self._view())
        self.feed(TimerFired())


class Tasks:
    """The agent's tasks: at most one of each, whose result is an event."""

    def __init__(self, feed: Callable[[AgentEvent], None]) -> None:
        self._feed = feed
        self._running: dict[Task, asyncio.Task[None]] = {}
        self._stopped: set[asyncio.Task[None]] = set()

    def start(self, task: Task, work: Coroutine[Any, Any, AgentEvent]) -> None:
        """Run `work` and feed the event that it returns; what it raises is a mistake of the agent's."""
        self.stop((task,))
        self._running[task] = asyncio.create_task(self._work(task, work))

    def stop(self, tasks: Iterable[Task]) -> None:
        """Cancel these without waiting: if one does not end, the repair goes on without it."""
        for task in tasks:
            if (running := self._running.pop(task, None)) is not None:
                running.cancel()
                self._stopped.add(running)
                running.add_done_callback(self._stopped.discard)

    async def close(self) -> None:
        """Cancel all, and wait for them."""
        self.stop(tuple(self._running))
        await asyncio.gather(*self._stopped, return_exceptions=True)

    async def _work(self, task: Task, work: Coroutine[Any, Any, AgentEvent]) -> None:
        try:
            event = await work
        except Exception as error:
            _log.exception("the agent made a mistake")
            event = Crashed(f"{type(error).__name__}: {error}")
        # Whoever was stopped meanwhile is not heard.
        if self._running.get(task) is asyncio.current_task():
            del self._running[task]
            self._feed(event)
