"""HTTP endpoints of the agent that serve this member's files to other members."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from dsv4_runtime.contract import WeightsPlan, WeightsSource
from dsv4_runtime.weights.checkpoint import CheckpointManifest
from dsv4_runtime.weights.messages import ROUTE, MemberWeights, StagingReport, StagingState
from dsv4_runtime.weights.store import Store

_NOT_SHARED = frozenset({WeightsSource.NANO, WeightsSource.PATH})


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
