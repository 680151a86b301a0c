"""Work queue with one worker per key, and the backoffs of the parts of a reconcile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dsv4_operator.api import Reason
from dsv4_operator.backends.base import BackendError
from dsv4_operator.kube.resources import KubeError
from dsv4_operator.lifecycle.status import Problem
from dsv4_runtime.contract.recovery import backoff
from dsv4_runtime.util.secrets import has_secret

QueueKeyT = TypeVar("QueueKeyT")

_log = logging.getLogger("dsv4")

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 300.0


@dataclass(slots=True)
class _KeyState:
    event: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    begun: float | None = None
    """Start of the present turn, by the clock of the event loop; None between turns."""


class WorkQueue(Generic[QueueKeyT]):
    """Calls `work` for every added key: immediately after an event, else at the time that the last call returned.

    Calls for one key never overlap; an event during a call causes another one. A call that raised is repeated after a
    backoff of 1 s to `longest` with jitter; an event shortens it to 1 s at least.
    """

    def __init__(
        self,
        work: Callable[[QueueKeyT], Awaitable[float | None]],
        *,
        workers: int = 16,
        min_interval: float = 0.0,
        longest: float = LONGEST_BACKOFF_SECONDS,
        failed: Callable[[QueueKeyT, Exception, float], None] | None = None,
    ) -> None:
        """Args:
        work: processes a key. Returns the seconds until the next call, None if the key is complete.
        workers: concurrent calls.
        min_interval: minimum seconds between two calls for one key, unless the first returned less.
        longest: longest backoff in seconds.
        failed: called after every call that raised, with the backoff.
        """
        self._work = work
        self._longest = longest
        self._slots = asyncio.Semaphore(workers)
        self._min_interval = min_interval
        self._failed = failed or _log_failure
        self._states: dict[QueueKeyT, _KeyState] = {}
        self._closed = False

    def add(self, key: QueueKeyT) -> None:
        """Record an event of `key`."""
        if self._closed:
            return
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _KeyState()
            state.task = asyncio.create_task(self._serve(key, state), name=f"turns of {key}")
        state.event.set()

    def __len__(self) -> int:
        """Return the number of keys that are not complete."""
        return len(self._states)

    @property
    def longest_call(self) -> float:
        """Return the seconds that the longest running call has taken."""
        begun = [state.begun for state in self._states.values() if state.begun is not None]
        return asyncio.get_running_loop().time() - min(begun) if begun else 0.0

    async def close(self) -> None:
        """Cancel all calls, including running ones: every action may be interrupted."""
        self._closed = True
        tasks = [state.task for state in self._states.values() if state.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._states.clear()

    async def _serve(self, key: QueueKeyT, state: _KeyState) -> None:
        failures = 0
        while True:
            state.event.clear()
            least = 0.0
            try:
                async with self._slots:
                    state.begun = asyncio.get_running_loop().time()
                    pause = await self._work(key)
                failures = 0
                least = min(pause or 0.0, self._min_interval)
            except Exception as error:
                failures += 1
                wait = backoff(failures, first=FIRST_BACKOFF_SECONDS, longest=self._longest)
                pause = wait * random.uniform(0.9, 1.1)  # noqa: S311
                least = min(pause, FIRST_BACKOFF_SECONDS)
                self._failed(key, error, pause)
            finally:
                state.begun = None
            if pause is not None:
                await asyncio.sleep(least)
                await wait_for(state.event, pause - least)
            elif not state.event.is_set():
                del self._states[key]
                return


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait for `event`, at most `seconds`."""
    # Not `asyncio.wait_for`, which before Python 3.12 loses a cancellation that coincides with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()


def _log_failure(key: object, error: Exception, pause: float) -> None:
    _log.error("%s failed, again in %.1f s", key, pause, exc_info=error)


FIRST_SECONDS = 1.0
"""Wait after the first failure of a part."""
REPEAT_SECONDS = 1800.0
"""Interval between events about a lasting failure: the API server drops events after an hour."""
_LONGEST_MESSAGE = 500
_QUOTED_OR_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_EXPECTED = (BackendError, KubeError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a reconcile that fails and is repeated separately."""

    name: str
    """`machines`, `observe`, `decide`, `plan`, `act`, `frontend` or `status`; a label of the metrics."""
    longest: float = field(compare=False)
    """Longest wait in seconds between two attempts."""
    group: int | None = None
    """Index of its group; None: of the whole deployment."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Consecutive failures of one part."""

    count: int
    until: float
    """Unix time of the next attempt."""
    message: str
    what: object
    """Identity of the attempt; the backoff does not apply to other attempts."""
    reported: float
    """Unix time of the latest event about `message`."""
    reason: Reason = Reason.ACTION_FAILED
    """Reason of the event and the condition."""


class Backoffs:
    """Failing parts with the time of the next attempt of each. Without a clock: times are arguments."""

    def __init__(self, jitter: Callable[[], float] = lambda: random.uniform(0.9, 1.1)) -> None:  # noqa: S311
        self._failures: dict[Part, Failure] = {}
        self._jitter = jitter

    def waits(self, part: Part, now: float, what: object = None) -> bool:
        """Return whether the same attempt failed and is in backoff."""
        known = self._failures.get(part)
        return known is not None and known.what == what and now < known.until

    def failed(
        self,
        part: Part,
        message: str,
        now: float,
        what: object = None,
        *,
        reason: Reason = Reason.ACTION_FAILED,
        seconds: float | None = None,
    ) -> tuple[Failure, bool]:
        """Count a failure; return it, and whether to report it as an event.

        Args:
            part: the failed part.
            message: the error, for users.
            now: Unix time.
            what: identity of the attempt; the backoff does not apply to other attempts.
            reason: of the event and the condition.
            seconds: until the next attempt; None: with backoff.
        """
        known = self._failures.get(part)
        count = known.count + 1 if known is not None and known.what == what else 1
        again = known is not None and known.message == message and 0 <= now - known.reported < REPEAT_SECONDS
        wait = seconds if seconds is not None else backoff(count, first=FIRST_SECONDS, longest=part.longest)
        reported = known.reported if known is not None and again else now
        failure = self._failures[part] = Failure(count, now + wait * self._jitter(), message, what, reported, reason)
        return failure, not again

    def succeeded(self, part: Part) -> None:
        """Drop the failures of `part`."""
        self._failures.pop(part, None)

    def keep(self, groups: Iterable[int]) -> None:
        """Drop the failures of all groups except `groups`."""
        kept = {None, *groups}
        self._failures = {part: failure for part, failure in self._failures.items() if part.group in kept}

    def message(self, part: Part) -> str | None:
        """Return the message of a part that fails."""
        failure = self._failures.get(part)
        return failure.message if failure is not None else None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts whose latest attempt failed."""
        return tuple(self._failures)

    def due(self, now: float) -> float:
        """Return the Unix time of the earliest attempt after `now`; infinity if no part waits for one."""
        return min((failure.until for failure in self._failures.values() if failure.until > now), default=math.inf)

    def problems(self) -> tuple[Problem, ...]:
        """Return the messages for the status, in a fixed order."""
        ordered = sorted(self._failures, key=lambda part: (part.group is None, part.group or 0, part.name))
        failures = ((part, self._failures[part]) for part in ordered)
        return tuple(Problem(failure.message, part.group, failure.reason) for part, failure in failures)


def is_expected(error: BaseException) -> bool:
    """Return whether `error` describes an external condition, not a defect."""
    return isinstance(error, _EXPECTED)


def text_of(error: BaseException) -> str:
    """Return the message of `error` for users: one line, at most 500 characters, without secrets."""
    if not is_expected(error):
        return f"internal error ({type(error).__name__}); see the operator's log"
    text = _QUOTED_OR_WORD.sub(
        lambda word: "(hidden)" if has_secret(word[0]) else word[0], " ".join(str(error).split())
    )
    if has_secret(text):
        text = f"{type(error).__name__} (the message is hidden because it contains a secret)"
    if not text:
        return type(error).__name__
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."
