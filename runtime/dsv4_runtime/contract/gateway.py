"""Input of the gateway of a group: its limits, once, and where the group is, whenever that changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dsv4_runtime.contract.base import Document, Report
from dsv4_runtime.contract.plan import Seconds

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
    """Names that `/v1/models` answers while the engine is away."""
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


class GatewayRoute(GroupRoute):
    """Current routes to the groups. The gateway reads the file again when it changes."""

    token_key_file: str
    """The file with the key that the tokens of all incarnations are made with."""
    others: tuple[GroupRoute, ...] = ()
    """The deployment's other groups: a gateway serves all of them, and its own first where they are as busy."""

    @classmethod
    def of(cls, own: int, routes: Sequence[GroupRoute], token_key_file: str) -> GatewayRoute:
        """Return the route of the gateway of group `own` among `routes`, which are in the groups' order."""
        others = (*routes[:own], *routes[own + 1 :])
        return cls(**dict(routes[own]), token_key_file=token_key_file, others=others)

    @property
    def groups(self) -> tuple[GroupRoute, ...]:
        """Return every group, the gateway's own first."""
        return (self, *self.others)


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


class KindReport(Report):
    """Answer of a gateway process to `GET /dsv4/process/kinds`, for the others at its address."""

    deaths: tuple[KindDeath, ...] = ()
    """The latest, oldest first."""
    answered: tuple[tuple[float, tuple[Kind, ...]], ...] = ()
    """Combinations of features with the time of the latest complete answer, on the machine's monotonic clock."""
