"""Documents between agent and staging process (job, reports), and files for other members (`/v1/weights`)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from aiohttp import web
from pydantic import Field

from dsv4_runtime.contract import Cause, Report, WeightsPlan, WeightsSource
from dsv4_runtime.weights.checkpoint import CheckpointManifest
from dsv4_runtime.weights.store import Store

ROUTE = "/v1/weights"
"""Path prefix of the weights in an agent's HTTP API."""
_NOT_SHARED = frozenset({WeightsSource.NANO, WeightsSource.PATH})


class StagingState(StrEnum):
    """State of a member's staging."""

    AWAY = "Away"
    """Staging has not started."""
    BLOCKED = "Blocked"
    """Another process stages into the same directory; this member waits for it."""
    ACTIVE = "Active"
    COMPLETE = "Complete"


class MemberWeights(Report):
    """Response to `GET /v1/weights`: the checkpoint files of a member."""

    stance: StagingState = StagingState.AWAY
    claimed: bool = False
    """Whether the member fetches from the origin."""
    held: int = 0
    """Bytes present, including unfinished files."""
    files: dict[str, str] = Field(default_factory=dict)
    """Finished files offered to other members, with SHA-256."""


def fetches_from_origin(me: int, held: int, claimed: bool, others: Mapping[int, MemberWeights]) -> bool:
    """Return whether this member fetches the files from the origin that no member has.

    Members with the same information choose the same one: of those that have begun, the lowest rank; else the one with
    the most bytes, the lowest rank on a tie.

    Args:
        me: rank of this member.
        held: bytes of this member.
        claimed: whether this member has begun.
        others: latest responses of reachable members.
    """
    active = {rank: offer for rank, offer in others.items() if offer.stance is StagingState.ACTIVE}
    begun = [rank for rank, offer in active.items() if offer.claimed] + ([me] if claimed else [])
    if begun:
        return min(begun) == me
    return all((offer.held, -rank) < (held, -me) for rank, offer in active.items())


class StagingJob(Report):
    """Staging job, sent as the first line of stdin. The process ends with its stdin."""

    weights: WeightsPlan
    rank: int = 0
    members: dict[int, str] = Field(default_factory=dict)
    """Agent URLs of the other members by rank."""
    token: str = ""
    """Token of those agents."""
    resident_bytes: int = 0
    """Memory of this member's engine."""
    stages: tuple[int, int, int] | None = None
    """First and last pipeline stage of this member's ranks, and the number of stages."""


class StagingReport(Report):
    """Report of the staging process, one per output line."""

    stage: str | None = None
    """Progress text."""
    percent: float | None = None
    stance: StagingState | None = None
    claimed: bool = False
    held: int = 0
    fetched: int = 0
    """Bytes received over the network so far."""
    disk_bytes_per_second: float | None = None
    """Disk throughput, once enough bytes were read."""
    verified: bool = False
    """Whether the content of all files was verified."""
    wrong: tuple[str, ...] = ()
    """Files with wrong content, which were fetched again."""
    error: str | None = None
    """Reason of the failure, in the last line."""
    cause: Cause | None = None
    """Of `error`."""


class WeightsServer:
    """Endpoints below `/v1/weights`, protected by the incarnation's token."""

    def __init__(self, plan: WeightsPlan) -> None:
        self._plan = plan
        self._store = Store(Path(plan.path), plan.identity, plan.shared)
        self._latest = StagingReport()

    def heard(self, news: StagingReport) -> None:
        """Store the latest report of the staging process."""
        if news.stance is not None:
            self._latest = news

    def add_to(self, app: web.Application) -> None:
        """Add the routes if members share this checkpoint."""
        if self._plan.from_members and self._plan.source not in _NOT_SHARED:
            app.router.add_get(ROUTE, self._offer)
            app.router.add_get(f"{ROUTE}/manifest", self._manifest)
            app.router.add_get(f"{ROUTE}/files/{{name:.+}}", self._file)

    async def _offer(self, request: web.Request) -> web.Response:
        if request.query.get("identity") != self._plan.identity:
            raise web.HTTPConflict(text=f"this member's checkpoint is {self._plan.identity}\n")
        news, manifest = self._latest, self._store.manifest()
        finished = self._store.finished(manifest) if manifest else {}
        offer = MemberWeights(
            stance=news.stance or StagingState.AWAY,
            claimed=news.claimed,
            held=news.held,
            files={name: entry.sha256 for name, entry in finished.items()},
        )
        return web.Response(text=offer.to_json(), content_type="application/json")

    def _known(self) -> CheckpointManifest:
        manifest = self._store.manifest()
        if manifest is None:
            raise web.HTTPNotFound(text="this member has no manifest yet\n")
        return manifest

    async def _manifest(self, _: web.Request) -> web.Response:
        return web.Response(text=self._known().to_json(), content_type="application/json")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._store.finished(self._known()):
            raise web.HTTPNotFound(text=f"this member has no finished {name}\n")
        # aiohttp supports ranges and sendfile: the bytes do not pass through Python.
        return web.FileResponse(self._store.folder / name)
