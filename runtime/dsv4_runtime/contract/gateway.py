"""Documents of the gateway: limits, routes, answers of its own paths; the status page, also of the operator."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from importlib import resources
from typing import Annotated

from pydantic import Field

from dsv4_runtime.contract.base import Document, Report
from dsv4_runtime.contract.kernels import KernelStatus
from dsv4_runtime.contract.plan import Seconds
from dsv4_runtime.contract.recovery import within
from dsv4_runtime.contract.status import Cause, Health, MemoryUse

ENVIRONMENT = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=262144",
}
"""Environment of its process: Python's objects in huge pages, if the kernel provides them on request.

Between two requests others fill caches and TLBs; fewer pages are found again sooner (docs/decisions/0006, glibc 2.35).
Long bodies have pages of their own, which grow without a copy and go back to the kernel at once: glibc would raise the
threshold to the size of the first body that it frees, and keep those that follow in its heap.
"""


_COMMENT = re.compile(r"(?:^|[ \t])#.*")
_UNSENDABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
"""Characters that no header may have (RFC 9110, 5.5)."""


def api_keys(text: str) -> tuple[str, ...]:
    """Return the keys in the text of a file of API keys: one a line, a `#` at its beginning or after a blank begins a
    comment.

    Raises:
        ValueError: a key cannot be sent in a header; the text names its line.
    """
    found = []
    for number, line in enumerate(re.split("\r\n|\r|\n", text.removeprefix("\ufeff")), 1):
        key = _COMMENT.sub("", line, count=1).strip(" \t")
        if _UNSENDABLE.search(key):
            raise ValueError(
                f"line {number}: the key has a control character, which no header can have; remove the character"
            )
        if key:
            found.append(key)
    return tuple(found)


class GatewaySettings(Document):
    """Limits of one gateway; another one is started for other limits. Sizes in bytes, times in seconds."""

    served_names: tuple[str, ...] = Field(min_length=1)
    """Names of the model in groups whose route has none."""
    hold_timeout_seconds: Annotated[float, Field(ge=0)]
    """Time for which a request waits for an engine that is away; 0: not at all."""
    max_held_requests: int = Field(ge=0)
    max_held_bytes: int = Field(ge=0)
    """Bodies of the requests that wait, together."""
    max_client_bytes: int = Field(default=384 * 2**20, ge=2**20)
    """Limit for all data of clients together: connections, heads, bodies, and buffered answers."""
    request_timeout_seconds: Seconds
    """From the arrival of a request to the last byte of its answer."""
    max_body_bytes: int = Field(ge=1)
    drain_seconds: Annotated[float, Field(ge=0)]
    """From the end of the lame duck until open requests are ended."""
    lame_duck_seconds: Annotated[float, Field(ge=0)] = 0.0
    """From SIGTERM until the gateway stops accepting: time for endpoints and load balancers to stop using it."""
    service_url: str | None = None
    """URL of the Service in front of all gateways. Without another gateway behind it a terminating gateway ends open
    requests after 15 s, because a deleted deployment has no engine for them. None: there is no such Service."""
    api_keys_file: str | None = None
    """A file with one key a line; None: no authentication."""


class PageFailure(Report):
    """One death on the status page."""

    time: float
    """Unix time of the detection."""
    cause: Cause = Cause.UNKNOWN
    incarnation: int = 0
    generation: int | None = None
    """Engine generation that died; None: it was not the death of an engine."""
    level: int | None = None
    """1: engine restart in place; 2: new incarnation; 3: given up."""
    rank: int | None = None
    """First failed member."""
    node: str = ""
    """Machine of that member."""
    message: str = ""
    """First fatal line, or the observation."""
    detected_by: str = ""
    recover_seconds: float | None = None
    """From `time` until the next checked completion; None until then."""
    evidence: str = ""
    """Location of the evidence."""

    @property
    def key(self) -> tuple[int, float]:
        """Identity in its group: an engine generation dies once; other deaths differ by their second."""
        return self.incarnation, -self.generation if self.generation is not None else int(self.time)


class GroupRoute(Report):
    """Current route to one group of the deployment."""

    group: int = Field(default=0, ge=0)
    agent: str
    """Base URL of the head's agent."""
    api: str
    """Base URL of vLLM."""
    given_up: str | None = None
    """Reason for which the group does not recover by itself, so that requests do not wait for it. None: it may
    recover."""
    failures: tuple[PageFailure, ...] = ()
    """Latest deaths in the control side's status, oldest first, where each of them can be written to the route."""
    served_names: tuple[str, ...] = ()
    """Names of the model in the group's incarnation; empty: those of the settings."""


class GatewayRoute(GroupRoute):
    """Current routes to the groups. The gateway reads the file again when it changes."""

    token_key_file: str
    """The file with the key that the tokens of all incarnations are made with."""
    dashboard: str | None = None
    """URL of the Ray dashboard for users."""
    others: tuple[GroupRoute, ...] = ()
    """The deployment's other groups: a gateway serves all of them, and its own first where they are as busy."""

    @classmethod
    def of(
        cls, own: int, routes: Sequence[GroupRoute], token_key_file: str, dashboard: str | None = None
    ) -> GatewayRoute:
        """Return the route of the gateway of group `own` among `routes`, which are in the groups' order."""
        others = (*routes[:own], *routes[own + 1 :])
        return cls(**dict(routes[own]), token_key_file=token_key_file, dashboard=dashboard, others=others)

    @property
    def groups(self) -> tuple[GroupRoute, ...]:
        """Return every group, the gateway's own first."""
        return (self, *self.others)


class PageLoad(Report):
    """Figures of vLLM's metrics, of all engine cores of a group."""

    running: int
    waiting: int
    tokens_per_second: float | None = None
    """Generated tokens; None: there is one sample only."""
    prompt_tokens_per_second: float | None = None
    usage: float | None = None
    """Used share of the KV cache, 0 to 1."""


class PageRequests(Report):
    """Requests at the gateways of one address, since their start."""

    active: int = 0
    """In progress, held ones included."""
    held: int = 0
    """Waiting for an engine."""
    held_bytes: int = 0
    replayed: int = 0
    """Repeated from their start."""
    continued: int = 0
    """Streams continued after a death of the engine."""
    cut: int = 0
    """Started responses that ended with an error."""
    ok: int = 0
    total: int = 0
    """Ended requests of every outcome."""


class Figures(Report):
    """Figures of a gateway for the operator's status page."""

    requests: PageRequests
    loads: dict[int, PageLoad] = Field(default_factory=dict)
    """By index of the group; groups whose vLLM did not answer are missing. Rates are means since the report before."""


class CanaryReport(Report):
    """Response of a gateway to `GET /dsv4/canary`: one token completed on the way that clients' requests take."""

    ok: bool
    reason: str = ""
    """One line; empty if `ok`."""
    group: int | None = None
    """Index of the group that the request went to; None: to none."""
    generation: str | None = None
    """Incarnation and engine generation, as in `1-g2`; None: the request went to no engine."""
    seconds: float = 0.0
    """Duration of the completion."""
    gateway: str = ""
    """Host name of the gateway, which is the pod's name in a cluster."""
    figures: Figures | None = None


class FatalRequest(Report):
    """A request that was refused because engines died of it, without its contents."""

    id: str
    """Its `X-Request-Id`."""
    size: int
    """Bytes of its body."""
    engines: int
    """That died while they had it."""
    time: float
    """Unix time at which it was refused."""


class Kind(StrEnum):
    """Features of requests that are refused together if engines die of them."""

    STRUCTURED_OUTPUT = "structured output"
    TOOLS = "tools"
    IMAGES = "images"
    LONG_CONTEXT = "long context"


class FatalKind(Report):
    """A kind of requests that is refused because engines died of it."""

    kinds: tuple[Kind, ...]
    """Requests with all of these features are refused."""
    engines: int
    """Number of engines that died while they had such a request."""
    seconds: float
    """Remaining time of the refusal."""


class FatalRequests(Report):
    """Answer of a gateway to `GET /dsv4/fatal-requests`: the latest, oldest first."""

    requests: tuple[FatalRequest, ...] = ()
    kinds: tuple[FatalKind, ...] = ()
    """The kinds refused at present."""


class KindDeath(Report):
    """The death of an engine with the kinds of the requests of one gateway process."""

    generation: str
    time: float
    """Seconds of the machine's monotonic clock."""
    kinds: tuple[tuple[Kind, ...], ...] = ()
    """Features of each request, each combination once; empty: the process had no request there."""
    again: tuple[tuple[Kind, ...], ...] = ()
    """The same of requests that the engine of the death before also had."""


class KindRefusal(Report):
    """A refused kind; times are seconds of the machine's monotonic clock."""

    kinds: tuple[Kind, ...]
    engines: int
    """Number of engines that died while they had such a request."""
    death: float
    """Time of the latest of these deaths."""
    since: float
    """An answer after this time ends the refusal."""


class KindReport(Report):
    """Answer of a gateway process to `GET /dsv4/process/kinds`, for the others at its address."""

    deaths: tuple[KindDeath, ...] = ()
    """The latest, oldest first."""
    answered: tuple[tuple[float, tuple[Kind, ...]], ...] = ()
    """Combinations of features with the time of the latest complete answer, on the machine's monotonic clock."""
    refused: tuple[KindRefusal, ...] = ()
    """For a process that was replaced: it has observed no death."""


PAGE_VERSION = 1
"""Version of `StatusPage`; a change that an older page would misread needs a new one."""
PAGE_FAILURES = 20
"""Latest deaths of a group on the page."""


class PageMember(Document):
    """One member of a group."""

    rank: int
    node: str = ""
    """Machine of the member."""
    phase: str = ""
    """Phase in its agent's latest report; empty before the first."""
    health: Health | None = None
    """Health in the verdict of its agent; None: not known here."""
    since: float | None = None
    """Unix time at which the phase began, by the member's clock."""
    message: str = ""
    """Progress, or the end of the member."""
    warnings: tuple[str, ...] = ()
    silent_since: float | None = None
    """Unix time of its agent's last answer, if that is no longer fresh."""
    memory: MemoryUse | None = None


class PageVerdict(Document):
    """Verdict about the group's engine."""

    health: Health
    cause: Cause | None = None
    """Of a dead or suspect engine."""
    message: str = ""


class PageBudget(Document):
    """Restart budget of a group."""

    allowed: int
    """Restarts of any level within the window."""
    left: int
    window_seconds: float
    next_restart: float | None = None
    """Unix time of a pending restart."""

    @classmethod
    def of(
        cls, allowed: int, window: float, restarts: Iterable[float], now: float, next_restart: float | None = None
    ) -> PageBudget:
        """Return the budget at `now` after `restarts`; all Unix times."""
        left = max(0, allowed - len(within(window, set(restarts), now)))
        return cls(allowed=allowed, left=left, window_seconds=window, next_restart=next_restart)


class PageCache(Document):
    """KV cache of a group's engine."""

    tokens: int
    planned_tokens: int | None = None
    """In the memory plan."""
    concurrency: float = 0.0
    """Requests of the greatest length that fit at once."""
    usage: float | None = None
    """Used share, 0 to 1; None: not known here."""


class PageGroup(Document):
    """One group."""

    deployment: str
    """Key of its deployment in `StatusPage.deployments`."""
    index: int
    phase: str
    """Phase of the group (operator), or of its head (gateway)."""
    since: float | None = None
    """Unix time at which the phase began."""
    incarnation: int = 0
    generation: int = 0
    """Engine generations in this incarnation."""
    ready_since: float | None = None
    """Unix time of the first checked completion of the present engine generation."""
    expected_ready_seconds: float | None = None
    """Expected duration of a start."""
    message: str = ""
    """Reason why it does not serve."""
    verdict: PageVerdict | None = None
    members: tuple[PageMember, ...] = ()
    budget: PageBudget | None = None
    total_restarts: int | None = None
    cache: PageCache | None = None
    load: PageLoad | None = None
    memory: dict[str, int] = Field(default_factory=dict)
    """Item of the memory plan to measured minus planned bytes."""
    kernels: tuple[KernelStatus, ...] = ()
    failures: tuple[PageFailure, ...] = ()
    """Latest deaths, oldest first."""

    @property
    def key(self) -> str:
        """Identity on the page, in `StatusPage.gone`; no name contains `#`."""
        return f"{self.deployment}#{self.index}"


class PageDeployment(Document):
    """One deployment."""

    key: str
    """`namespace/name`, or the name alone."""
    phase: str
    message: str = ""
    """Reason why it is not ready."""
    ready: int = 0
    """Serving groups."""
    wanted: int = 0
    models: tuple[str, ...] = ()
    """Names of the model in the API."""
    endpoint: str = ""
    """Base URL of the API."""
    dashboard: str = ""
    """URL of the Ray dashboard."""
    requests: PageRequests | None = None


class StatusPage(Document):
    """Document of the status page: complete, or the entries that changed since the one before."""

    version: int = PAGE_VERSION
    source: str
    """`gateway`: one deployment; `operator`: a fleet."""
    time: float
    """Unix time."""
    deployments: tuple[PageDeployment, ...] = ()
    groups: tuple[PageGroup, ...] = ()
    gone: tuple[str, ...] = ()
    """Keys of removed deployments and groups, in a document of changes."""

    def since(self, before: StatusPage | None) -> StatusPage | None:
        """Return the entries that differ from `before`; None without any; the complete document without `before`."""
        if before is None:
            return self
        deployments = {one.key: one for one in before.deployments}
        groups = {one.key: one for one in before.groups}
        kept = {one.key for one in self.deployments} | {one.key for one in self.groups}
        changes = StatusPage(
            source=self.source,
            time=self.time,
            deployments=tuple(one for one in self.deployments if deployments.get(one.key) != one),
            groups=tuple(one for one in self.groups if groups.get(one.key) != one),
            gone=tuple(key for key in (*deployments, *groups) if key not in kept),
        )
        return changes if changes.deployments or changes.groups or changes.gone else None

    def event(self, name: str) -> bytes:
        """Return the document as a server-sent event; JSON text has no line break."""
        return f"event: {name}\ndata: {self.to_json()}\n\n".encode()


def page_event(before: StatusPage | None, now: StatusPage) -> bytes | None:
    """Return the event `page` (complete) without `before`, else `change`; None if nothing changed."""
    changes = now.since(before)
    return None if changes is None else changes.event("page" if before is None else "change")


@functools.cache
def page_file(*, key: bool) -> tuple[bytes, dict[str, str]]:
    """Return the status page as HTML, with whether its data require a key, and its headers. It contains no data, no
    secret and no external resource.

    The policy admits exactly the script and the style sheet in the file, and no other way to run or load anything;
    `require-trusted-types-for` forbids the script to turn text into markup.
    """
    text = resources.files("dsv4_runtime.contract").joinpath("status.html").read_text("utf-8")
    text = text.replace('content="KEY"', f'content="{"required" if key else "none"}"')
    hashes = {}
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return text.encode(), {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of the page's stream; the third turns off buffering in nginx."""
VIEWERS = 8
"""Streams of the page at the same time."""
VIEW_SECONDS = 600.0
"""Longest duration of a stream, after which the page opens another one: a removed key ends within it."""
