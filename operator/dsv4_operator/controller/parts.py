"""Parts of a reconcile: each has its own backoff, message and event, so that none delays another."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dsv4_operator.api import Reason
from dsv4_operator.backends.base import BackendError
from dsv4_operator.kube.errors import KubeError
from dsv4_operator.lifecycle.problems import Problem
from dsv4_runtime.contract.recovery import backoff
from dsv4_runtime.util.secrets import has_secret

FIRST_SECONDS = 1.0
"""Wait after the first failure of a part."""
REPEAT_SECONDS = 1800.0
"""Between two events about a failure that lasts: the API server drops an event after an hour."""
_LONGEST_MESSAGE = 500
_QUOTED_OR_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_EXPECTED = (BackendError, KubeError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a reconcile that fails and is repeated by itself."""

    name: str
    """`machines`, `observe`, `decide`, `plan`, `act`, `frontend` or `status`; a label of the metrics."""
    longest: float = field(compare=False)
    """Longest wait in seconds between two attempts."""
    group: int | None = None
    """Index of its group; None: of the whole deployment."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Failures in a row of one part."""

    count: int
    until: float
    """Unix time of the next attempt."""
    message: str
    what: object
    """Identity of the attempt; another one does not wait."""
    reported: float
    """Unix time of the latest event about `message`."""
    reason: Reason = Reason.ACTION_FAILED
    """Reason of the event and the condition."""


class Backoffs:
    """The parts that fail now, with the time of the next attempt of each. It has no clock: times are arguments."""

    def __init__(self, jitter: Callable[[], float] = lambda: random.uniform(0.9, 1.1)) -> None:  # noqa: S311
        self._failures: dict[Part, Failure] = {}
        self._jitter = jitter

    def waits(self, part: Part, now: float, what: object = None) -> bool:
        """Return whether the same attempt failed and its wait is not over."""
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
        """Count a failure; return it, and whether it is to be reported as an event.

        Args:
            part: it failed.
            message: the error, for users.
            now: Unix time.
            what: identity of the attempt; another one does not wait.
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
        """Drop the failures of all groups but these."""
        kept = {None, *groups}
        self._failures = {part: failure for part, failure in self._failures.items() if part.group in kept}

    def message(self, part: Part) -> str | None:
        """Return the message of a part that fails."""
        failure = self._failures.get(part)
        return failure.message if failure is not None else None

    def due(self, now: float) -> float:
        """Return the Unix time of the earliest attempt after `now`; infinity if no part waits for one."""
        return min((failure.until for failure in self._failures.values() if failure.until > now), default=math.inf)

    def problems(self) -> tuple[Problem, ...]:
        """Return the messages for the status, in a fixed order."""
        ordered = sorted(self._failures, key=lambda part: (part.group is None, part.group or 0, part.name))
        failures = ((part, self._failures[part]) for part in ordered)
        return tuple(Problem(failure.message, part.group, failure.reason) for part, failure in failures)


def is_expected(error: BaseException) -> bool:
    """Return whether `error` describes a condition outside of this process, not a defect."""
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
