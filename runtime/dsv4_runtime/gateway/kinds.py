"""Kinds of requests that kill engines: which features a request uses, and which features are refused for a time.

Two deaths convict a kind if nothing else explains both: no request of another kind was in the engine at both, no second
kind was, and no request of the kind was answered since, or shortly before. Requests without any feature are never
refused here. All functions take the time; the processes of one gateway exchange `KindReport`, and the clock is the
machine's, so that all of them reach the same result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4_runtime.contract import Cause
from dsv4_runtime.contract.gateway import FatalKind, Kind, KindDeath, KindRefusal, KindReport
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.admission import parse_object
from dsv4_runtime.gateway.errors import RefusedError

_log = logging.getLogger("dsv4.gateway")

PROVEN_SECONDS = 600.0
"""An answer for a kind counts for this long before a death."""
REFUSED_SECONDS = 600.0
"""First time for which a kind is refused, from the death on; doubled by each further death, up to"""
MAX_REFUSED_SECONDS = 7200.0
KEPT_SECONDS = 3600.0
"""Maximum time between the two deaths, and for which an expired refusal is renewed by one further death."""
SETTLED_SECONDS = 0.2
"""Time after a death after which all processes of a gateway have recorded it."""
_MAX_DEATHS = 16
LONG_BYTES = 2**18
"""Body of a request with a long context: about 64,000 tokens of English text."""

# Of other causes, such as a lost node or a full disk, no request is guilty.
_CAUSES = frozenset(
    {
        *(Cause.ENGINE_CORE_DIED, Cause.ENGINE_EXITED, Cause.ENGINE_HUNG, Cause.API_SERVER_DIED, Cause.API_SERVER_HUNG),
        *(Cause.RAY_WORKER_DIED, Cause.NCCL_TIMEOUT, Cause.XID_ERROR, Cause.OUT_OF_MEMORY_GPU, Cause.KERNEL_MISSING),
        Cause.UNKNOWN,
    }
)

Kinds = frozenset[Kind]
PLAIN: Kinds = frozenset()

_STRUCTURED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "output_format")
# Tuples: a value that is compared can have any type, also one without a hash.
_FORMATS = ("json_object", "json_schema", "structural_tag")
_MEDIA = ("image_url", "input_image", "image", "image_embeds", "input_audio", "audio_url", "video_url")
# A short body without any of them is not parsed. A quotation mark within a text has a backslash before it.
_WORDS = tuple(f'"{word}"'.encode() for word in (*_STRUCTURED, "response_format", "format", "tools", *_MEDIA))


def kinds_of(body: bytes | bytearray) -> Kinds:
    """Return the features that a request's body uses."""
    parsed = parse_object(body) if len(body) >= LONG_BYTES or any(word in body for word in _WORDS) else None
    found = set() if parsed is None else set(_features(parsed))
    if len(body) >= LONG_BYTES and Kind.IMAGES not in found:
        found.add(Kind.LONG_CONTEXT)
    return frozenset(found)


def _features(body: Mapping[str, Any]) -> Iterator[Kind]:
    choice, text = body.get("tool_choice"), body.get("text")
    forced = choice == "required" or (isinstance(choice, dict) and choice.get("type") not in ("auto", "none"))
    formats = [body.get("response_format"), text.get("format") if isinstance(text, dict) else None]
    named = any(isinstance(value, dict) and value.get("type") in _FORMATS for value in formats)
    if body.get("tools"):
        yield Kind.TOOLS
    if named or any(body.get(name) for name in _STRUCTURED) or (forced and body.get("tools")):
        yield Kind.STRUCTURED_OUTPUT
    if any(part.get("type") in _MEDIA for part in _parts(body)):
        yield Kind.IMAGES


def _parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the parts of all messages: of `messages`, and of `input` of the Responses API."""
    for name in ("messages", "input"):
        messages = body.get(name)
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            yield from (part for part in content if isinstance(part, dict)) if isinstance(content, list) else ()


def is_of_requests(cause: Cause | None) -> bool:
    """Return whether a request can be the reason of a death with this cause; None: not known."""
    return cause is None or cause in _CAUSES


@dataclass(slots=True)
class Refused:
    """A kind that is refused."""

    engines: int
    """Number of engines that died of it."""
    death: float
    """Time of the latest death."""
    since: float
    """An answer after this time clears it."""

    @property
    def until(self) -> float:
        """Return the end of the refusal."""
        return self.death + min(REFUSED_SECONDS * 2.0 ** (self.engines - 2), MAX_REFUSED_SECONDS)


class FatalKinds:
    """Deaths and answers by kind, and the refused kinds."""

    def __init__(self, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        """Args:
        clock: monotonic seconds of the machine.
        changed: called when other kinds are refused.
        """
        self._clock, self._changed = clock, changed
        self.shared = False
        """Whether other processes have observations too; then `judge` is called after `take`."""
        self._answered: dict[Kinds, float] = {}
        self._deaths: dict[str, KindDeath] = {}
        """By generation, with the observations of all processes."""
        self._digests: dict[bytes, Kinds] = {}
        """Requests of this process at its latest death with some."""
        self._refused: dict[Kinds, Refused] = {}

    def check(self, kinds: Kinds) -> None:
        """Raise RefusedError if requests of these kinds are refused now."""
        now = self._clock()
        for kind, refused in self._refused.items():
            if kind <= kinds and now < refused.until:
                raise RefusedError(errors.fatal_kind(name(kind), refused.engines, math.ceil(refused.until - now)))

    def is_proven(self, kinds: Kinds) -> bool:
        """Return whether a request of these kinds was answered lately; one without any feature counts as proven."""
        return not kinds or self._last_answer(kinds) >= self._clock() - PROVEN_SECONDS

    def answered(self, kinds: Kinds) -> None:
        """Record that the engine computed the answer of a request."""
        if kinds:
            self._answered[kinds] = self._clock()
            self._forget()

    def died(self, generation: str, requests: Mapping[bytes, Kinds], cause: Cause | None) -> None:
        """Record a reported death and the requests that may have been in the engine, by digest."""
        if not is_of_requests(cause):
            return
        again = {kinds for digest, kinds in requests.items() if digest in self._digests}
        death = KindDeath(
            generation=generation,
            time=self._clock(),
            kinds=_listed(requests.values()),
            again=_listed(again),
        )
        self._digests = dict(requests) or self._digests
        self._record(death)
        if not self.shared:
            self.judge()

    def _record(self, death: KindDeath) -> None:
        """Add a death, or what another process observed at a known one."""
        if (known := self._deaths.get(death.generation)) is not None:
            death = KindDeath(
                generation=death.generation,
                time=min(death.time, known.time),
                kinds=_listed(_sets((*death.kinds, *known.kinds))),
                again=_listed(_sets((*death.again, *known.again))),
            )
        self._deaths[death.generation] = death
        for old in sorted(self._deaths.values(), key=lambda death: death.time)[:-_MAX_DEATHS]:
            del self._deaths[old.generation]

    @property
    def active(self) -> bool:
        """Return whether a refusal or a recent death depends on observations of other processes."""
        recent = self._clock() - KEPT_SECONDS
        return bool(self._refused) or any(death.time > recent for death in self._deaths.values())

    def report(self) -> KindReport:
        """Return the observations of this process and of others: a process that replaces one of them needs these."""
        return KindReport(
            deaths=tuple(self._deaths.values()),
            answered=tuple((time, tuple(sorted(kinds))) for kinds, time in self._answered.items()),
            refused=tuple(
                KindRefusal(
                    kinds=tuple(sorted(kind)),
                    engines=refused.engines,
                    death=refused.death,
                    since=refused.since,
                )
                for kind, refused in self._refused.items()
            ),
        )

    def take(self, report: KindReport) -> None:
        """Add the observations of another process; its refusals count if they are stricter."""
        for time, kinds in report.answered:
            kind = frozenset(kinds)
            self._answered[kind] = max(time, self._answered.get(kind, time))
        for death in report.deaths:
            self._record(death)
        for one in report.refused:
            kind, refused = frozenset(one.kinds), Refused(one.engines, one.death, one.since)
            known = self._refused.get(kind)
            if not self._is_over(kind, refused) and (known is None or known.engines < refused.engines):
                self._refused[kind] = refused
                self._changed()

    @property
    def found(self) -> tuple[FatalKind, ...]:
        """Return the kinds refused now; times are of the machine's monotonic clock."""
        now = self._clock()
        return tuple(
            FatalKind(kinds=tuple(sorted(kind)), engines=refused.engines, seconds=refused.until - now)
            for kind, refused in self._refused.items()
            if now < refused.until
        )

    def _last_answer(self, kinds: Kinds) -> float:
        return max((time for answered, time in self._answered.items() if kinds <= answered), default=float("-inf"))

    def _is_over(self, kind: Kinds, refused: Refused) -> bool:
        """Return whether an answer refutes a refusal, or it expired and no death renewed it."""
        return self._last_answer(kind) > refused.since or self._clock() - refused.until > KEPT_SECONDS

    def _forget(self) -> None:
        self._refused = {kind: one for kind, one in self._refused.items() if not self._is_over(kind, one)}

    def judge(self) -> None:
        """Refuse the kind that explains the latest deaths, if there is one."""
        now = self._clock()
        self._forget()
        # Of engines that had requests.
        deaths = sorted((death for death in self._deaths.values() if death.kinds), key=lambda death: death.time)
        if not deaths or (self.shared and now - deaths[-1].time < SETTLED_SECONDS):
            return
        kind = self._explanation(deaths)
        if kind is None:
            return
        death, known = deaths[-1].time, self._refused.get(kind)
        if known is not None and death <= known.death:
            return
        if known is None and now - death > REFUSED_SECONDS:
            return
        if known is None:
            refused = Refused(2, death, deaths[-2].time - PROVEN_SECONDS)
        else:
            refused = Refused(known.engines + 1, death, known.since)
        self._refused[kind] = refused
        _log.error(
            "requests with %s are refused for %.0f s: %d engines died while they had one, and none was answered",
            name(kind),
            refused.until - now,
            refused.engines,
        )
        self._changed()

    def _explanation(self, deaths: list[KindDeath]) -> Kinds | None:
        """Return the only kind that can explain the latest deaths."""
        last = deaths[-1]
        present = _sets(last.kinds)
        known = [kind for kind, refused in self._refused.items() if refused.death < last.time]
        for kind in sorted(known, key=len, reverse=True):
            if any(kind <= kinds for kinds in present):
                return kind
        if len(deaths) < 2 or last.time - deaths[-2].time > KEPT_SECONDS:
            return None
        since = deaths[-2].time - PROVEN_SECONDS
        common = {one & other for one in _sets(deaths[-2].kinds) for other in present} - {PLAIN}
        left = {kind for kind in common if self._last_answer(kind) < since}
        widest = [kind for kind in left if not any(kind < other for other in left)]
        if len(widest) != 1 or not all(widest[0] <= kinds for kinds in _sets(last.again)):
            return None
        return widest[0]


def name(kinds: Kinds) -> str:
    """Return a kind for people."""
    return " and ".join(sorted(kind.value for kind in kinds))


def _sets(kinds: Iterable[Iterable[Kind]]) -> set[Kinds]:
    return {frozenset(one) for one in kinds}


def _listed(kinds: Iterable[Kinds]) -> tuple[tuple[Kind, ...], ...]:
    return tuple(sorted({tuple(sorted(one)) for one in kinds}))
