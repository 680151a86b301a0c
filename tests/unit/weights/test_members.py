"""Several members: one fetches from the origin, the others from it, over the real HTTP API of their agents."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from dsv4_runtime.agent import http
from dsv4_runtime.contract import Cause, WeightsPlan, WeightsSource
from dsv4_runtime.weights import staging, transfer
from dsv4_runtime.weights.checkpoint import ManifestFile, TransientError, WeightsError
from dsv4_runtime.weights.members import (
    MemberWeights,
    StagingJob,
    StagingReport,
    StagingState,
    WeightsServer,
    fetches_from_origin,
)
from dsv4_testkit.weights_servers import TOKEN, FileServer, Reporter, Server, arrived, same_files, wanted_files

Serve = Callable[[web.Application], Server]
SHARD = "model-00002-of-00003.safetensors"


@dataclass
class Member:
    """A member's directory, the server with which its agent shares it, and a staging like that of its agent."""

    rank: int
    plan: WeightsPlan
    share: WeightsServer
    server: Server
    fetched: int = 0
    error: WeightsError | None = None
    said: list[str] = field(default_factory=list)

    def stage(self, others: list[Member]) -> None:
        urls = {member.rank: member.server.url for member in others if member is not self}

        def hear(news: StagingReport) -> None:
            self.share.heard(news)
            self.said.append(news.stage or "")

        try:
            job = StagingJob(weights=self.plan, rank=self.rank, members=urls, token=TOKEN)
            self.fetched = staging.stage(job, hear).fetched
            self.share.heard(StagingReport(stance=StagingState.COMPLETE))
        except WeightsError as error:
            self.error = error

    @property
    def folder(self) -> Path:
        return Path(self.plan.path)


@pytest.fixture
def files(checkpoint: Path) -> FileServer:
    return FileServer(checkpoint)


@pytest.fixture
def make(files: FileServer, serve: Serve, tmp_path: Path) -> Callable[[int], list[Member]]:
    origin = serve(files.app).url

    def members(count: int) -> list[Member]:
        made = []
        for rank in range(count):
            plan = WeightsPlan(source=WeightsSource.HTTP, path=str(tmp_path / f"m{rank}"), origin=origin)
            share = WeightsServer(plan)
            app = http.application(cast("http.Reporter", Reporter()), TOKEN)
            share.add_to(app)
            made.append(Member(rank, plan, share, serve(app)))
        return made

    return members


def together(members: list[Member]) -> None:
    threads = [threading.Thread(target=member.stage, args=(members,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


def asked(files: FileServer) -> list[str]:
    return sorted(name for name, _ in files.requests)


def test_each_file_is_requested_once_from_the_origin(make: Callable[[int], list[Member]], files: FileServer) -> None:
    members = make(3)
    together(members)
    assert [member.error for member in members] == [None] * 3
    assert all(same_files(files.folder, member.folder) for member in members)
    assert len(asked(files)) == len(set(asked(files)))
    assert any("from rank" in text for text in members[1].said)


def test_a_complete_member_serves_all_files_without_requests_to_the_origin(
    make: Callable[[int], list[Member]], files: FileServer
) -> None:
    members = make(2)
    members[1].stage([])
    before = len(files.requests)
    members[0].stage(members)
    assert members[0].error is None
    assert same_files(files.folder, members[0].folder)
    assert len(files.requests) == before


def test_a_member_that_goes_away_in_between_is_replaced_by_the_origin(
    make: Callable[[int], list[Member]], files: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_GATHER_SECONDS", 1.0)
    members = make(2)
    members[1].stage([])
    files.requests.clear()
    slow = members[0]
    slow.plan = slow.plan.model_copy(update={"bandwidth_bytes": 5_000_000})
    thread = threading.Thread(target=slow.stage, args=(members,))
    thread.start()
    deadline = time.monotonic() + 60
    while arrived(slow.folder) < 4_000_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert files.requests == []
    members[1].server.stop()
    thread.join(300)
    assert not thread.is_alive()
    assert slow.error is None
    assert same_files(files.folder, slow.folder)
    # The bytes that came from the member were kept.
    assert slow.fetched == sum((files.folder / name).stat().st_size for name in wanted_files(files.folder))
    assert all(not given.endswith("=0-") for name, given in files.requests if name == SHARD)


def test_a_member_that_falls_silent_is_left_soon(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, files: FileServer
) -> None:
    over = threading.Event()

    async def silent(*_: object) -> web.StreamResponse:
        while not over.is_set():
            await asyncio.sleep(0.02)
        raise web.HTTPGone

    monkeypatch.setattr(WeightsServer, "_file", silent)
    monkeypatch.setattr(transfer, "MEMBER_TIMEOUT", (0.5, 0.5))
    members = request.getfixturevalue("make")(2)
    members[1].stage([])
    files.requests.clear()
    begun = time.monotonic()
    members[0].stage(members)
    over.set()
    time.sleep(0.3)
    assert members[0].error is None
    assert same_files(files.folder, members[0].folder)
    assert SHARD in asked(files)
    assert time.monotonic() - begun < 120


def test_a_file_that_is_damaged_on_a_member_is_fetched_from_the_origin(
    make: Callable[[int], list[Member]], files: FileServer
) -> None:
    members = make(2)
    members[1].stage([])
    shard = members[1].folder / SHARD
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    files.requests.clear()
    members[0].stage(members)
    assert members[0].error is None
    assert same_files(files.folder, members[0].folder)
    assert asked(files) == [SHARD]


def test_a_damaged_origin_is_named_on_the_member_that_fetches(
    make: Callable[[int], list[Member]], files: FileServer
) -> None:
    files.damage[SHARD] = 99
    members = make(1)
    members[0].stage([])
    assert members[0].error is not None
    assert members[0].error.cause is Cause.WEIGHTS_CORRUPT


def test_members_on_one_disk_fetch_once(make: Callable[[int], list[Member]], files: FileServer) -> None:
    members = make(2)
    members[1].plan = members[0].plan
    members[1].share._store = members[0].share._store
    files.pace = 20e6
    together(members)
    assert [member.error for member in members] == [None, None]
    assert same_files(files.folder, members[0].folder)
    assert len(asked(files)) == len(set(asked(files)))
    assert sorted(member.fetched > 0 for member in members) == [False, True]


def test_files_are_for_the_group_alone(make: Callable[[int], list[Member]]) -> None:
    member = make(1)[0]
    member.stage([])
    base, token = f"{member.server.url}/v1/weights", {"Authorization": f"Bearer {TOKEN}"}
    for path in ("", "/manifest", f"/files/{SHARD}"):
        assert httpx.get(base + path, timeout=60).status_code == 401
    assert httpx.get(base, params={"identity": "another"}, headers=token, timeout=60).status_code == 409
    assert httpx.get(f"{base}/files/none", headers=token, timeout=60).status_code == 404
    # Only files of the manifest are served, never a path.
    for name in ("..%2f..%2fetc%2fpasswd", ".dsv4%2fverified.json", "%2fetc%2fpasswd"):
        assert httpx.get(f"{base}/files/{name}", headers=token, timeout=60).status_code == 404
    answer = httpx.get(f"{base}/files/{SHARD}", headers={**token, "Range": "bytes=100-"}, timeout=60)
    assert answer.status_code == 206
    assert answer.content == (member.folder / SHARD).read_bytes()[100:]
    offer = httpx.get(base, params={"identity": member.plan.identity}, headers=token, timeout=60)
    assert SHARD in json.loads(offer.text)["files"]


@pytest.mark.parametrize(("status", "error"), [(404, WeightsError), (503, TransientError), (0, TransientError)])
def test_errors_of_members_are_classified_as_transient_or_final(
    serve: Serve, status: int, error: type[Exception]
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/{path:.+}", refuse)
    server = serve(app)
    if not status:
        server.stop()
    place = transfer.Members({3: server.url}, TOKEN, "any").sources[3]
    words = str(status) if status else "refused"
    with (
        pytest.raises(error, match=rf"a file from rank 3.*{words}"),
        place.open(ManifestFile(name="a file", size=9), 7),
    ):
        pass


offers = st.builds(MemberWeights, stance=st.sampled_from(StagingState), claimed=st.booleans(), held=st.integers(0, 3))


@given(st.lists(offers, min_size=1, max_size=8))
def test_exactly_one_of_the_active_fetches_from_the_origin(members: list[MemberWeights]) -> None:
    active = [rank for rank, offer in enumerate(members) if offer.stance is StagingState.ACTIVE]
    chosen = [
        rank
        for rank in active
        if fetches_from_origin(
            rank,
            members[rank].held,
            members[rank].claimed,
            {other: offer for other, offer in enumerate(members) if other != rank},
        )
    ]
    assert len(chosen) == (1 if active else 0)
    if chosen and not any(members[rank].claimed for rank in active):
        assert chosen[0] == min(active, key=lambda rank: (-members[rank].held, rank))
