"""One member stages from a web server: correct files, resumed transfers, named errors."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from dsv4_runtime.contract import Cause, PageCache, Verify, WeightsPlan, WeightsSource
from dsv4_runtime.weights import staging
from dsv4_runtime.weights import store as store_module
from dsv4_runtime.weights.checkpoint import WeightsError
from dsv4_runtime.weights.members import StagingJob, StagingReport
from dsv4_runtime.weights.origins import open_origin
from dsv4_runtime.weights.store import Store
from dsv4_testkit.weights_servers import FileServer, Server, cached_share, same_files

Serve = Callable[[web.Application], Server]
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def files(checkpoint: Path) -> FileServer:
    return FileServer(checkpoint)


@pytest.fixture
def plan(files: FileServer, serve: Serve, tmp_path: Path) -> WeightsPlan:
    return WeightsPlan(source=WeightsSource.HTTP, path=str(tmp_path / "weights"), origin=serve(files.app).url)


def stage(plan: WeightsPlan) -> tuple[int, list[StagingReport]]:
    news: list[StagingReport] = []
    return staging.stage(StagingJob(weights=plan), news.append).fetched, news


def test_all_files_are_fetched_and_a_restart_sends_no_request(plan: WeightsPlan, files: FileServer) -> None:
    fetched, news = stage(plan)
    assert same_files(files.folder, Path(plan.path))
    assert fetched == sum(
        path.stat().st_size for path in Path(plan.path).rglob("*") if ".dsv4" not in path.parts and path.is_file()
    )
    assert news[-1].percent is not None
    asked = len(files.requests)
    assert stage(plan)[0] == 0
    assert len(files.requests) == asked


def test_a_cut_transfer_goes_on_where_it_stopped(plan: WeightsPlan, files: FileServer) -> None:
    files.cut_after = 1_500_000
    fetched, _ = stage(plan)
    assert same_files(files.folder, Path(plan.path))
    ranges = [given for name, given in files.requests if name == SHARD]
    # Two cuts in a shard of 3.3 MB; each loses less than one chunk of the sent bytes.
    assert len(ranges) >= 3
    assert 1_500_000 - 2**20 <= int(ranges[1].removeprefix("bytes=").removesuffix("-")) <= 1_600_000
    assert fetched == sum(
        (files.folder / name).stat().st_size for name in {name for name, _ in files.requests} - {"SHA256SUMS"}
    )


def test_a_server_without_range_requests_is_supported(plan: WeightsPlan, files: FileServer) -> None:
    part = Path(plan.path)
    files.cut_after = 2_000_000
    original = files.send

    async def without(request: web.Request, name: str) -> web.StreamResponse:
        if any(entry[0] == name for entry in files.requests):
            files.cut_after = None
            return web.Response(body=(files.folder / name).read_bytes())
        return await original(request, name)

    files.send = without  # type: ignore[method-assign]
    stage(plan)
    assert same_files(files.folder, part)


def test_a_damaged_transfer_is_fetched_again_once(plan: WeightsPlan, files: FileServer) -> None:
    files.damage[SHARD] = 1
    stage(plan)
    assert same_files(files.folder, Path(plan.path))
    assert [given for name, given in files.requests if name == SHARD] == ["bytes=0-", "bytes=0-"]


def test_a_damaged_file_is_named(plan: WeightsPlan, files: FileServer) -> None:
    files.damage[SHARD] = 99
    with pytest.raises(WeightsError, match="also after it was fetched again") as caught:
        stage(plan)
    assert caught.value.cause is Cause.WEIGHTS_CORRUPT
    assert SHARD in str(caught.value)
    assert len([name for name, _ in files.requests if name == SHARD]) == 2
    assert not (Path(plan.path) / SHARD).exists()


def test_requests_to_busy_servers_are_repeated(plan: WeightsPlan, files: FileServer) -> None:
    answers = iter([503, 429])

    def busy(request: web.Request) -> web.Response | None:
        status = next(answers, None) if request.match_info["name"] == SHARD and request.method == "GET" else None
        return web.Response(status=status) if status else None

    files.answer = busy
    stage(plan)
    assert same_files(files.folder, Path(plan.path))


@pytest.mark.parametrize(
    ("status", "text"),
    [(401, "give credentials in secretKeyRef"), (403, "credentials that may read it"), (404, "check the name")],
)
def test_refusals_end_the_staging_at_once_with_a_remedy(
    plan: WeightsPlan, files: FileServer, status: int, text: str
) -> None:
    files.answer = lambda request: web.Response(status=status) if "00002" in request.path else None
    with pytest.raises(WeightsError, match=text) as caught:
        stage(plan)
    assert caught.value.cause is Cause.STAGING_FAILED


def test_a_token_is_sent(plan: WeightsPlan, files: FileServer, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("sesame\n")
    files.answer = lambda request: (
        None if request.headers.get("Authorization") == "Bearer sesame" else web.Response(status=401)
    )
    with pytest.raises(WeightsError, match="secretKeyRef"):
        stage(plan)
    stage(plan.model_copy(update={"credentials_file": str(secret)}))
    with pytest.raises(WeightsError, match="cannot be read"):
        stage(plan.model_copy(update={"path": plan.path + "2", "credentials_file": str(tmp_path / "none")}))


def test_full_verification_finds_changes_that_the_marker_misses(plan: WeightsPlan, files: FileServer) -> None:
    stage(plan)
    shard = Path(plan.path) / SHARD
    before = shard.stat()
    with shard.open("r+b") as stream:
        stream.seek(1_000_000)
        stream.write(b"\0\0\0\0")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert stage(plan)[0] == 0
    fetched, _ = stage(plan.model_copy(update={"verify": Verify.FULL}))
    assert fetched == before.st_size
    assert same_files(files.folder, Path(plan.path))


@pytest.mark.parametrize("change", ["touched", "shorter", "gone"])
def test_the_marker_detects_changed_files(plan: WeightsPlan, files: FileServer, change: str) -> None:
    stage(plan)
    shard = Path(plan.path) / SHARD
    if change == "touched":
        os.utime(shard, ns=(1, 1))
    elif change == "shorter":
        os.truncate(shard, 100)
    else:
        shard.unlink()
    fetched, _ = stage(plan)
    # A file with changed times but the same bytes is read again, not fetched.
    assert fetched == (0 if change == "touched" else (files.folder / SHARD).stat().st_size)
    assert same_files(files.folder, Path(plan.path))


def test_a_disk_without_room_is_named_before_anything_comes(
    plan: WeightsPlan, files: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    monkeypatch.setattr("dsv4_runtime.weights.store.SPARE_BYTES", real(plan.path.rsplit("/", 1)[0]).f_blocks * 4096)
    with pytest.raises(
        WeightsError, match=r"the disk of .* has .* free, and 9\.9 MB of weights are still to come"
    ) as caught:
        stage(plan)
    assert caught.value.cause is Cause.DISK_FULL
    assert {name for name, given in files.requests if given} == set()


@pytest.mark.parametrize("room", [0, -1])
def test_files_of_a_copy_without_marker_need_no_room(
    plan: WeightsPlan, files: FileServer, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    folder, began = Path(plan.path), 1 << 20
    manifest = open_origin(plan).manifest()
    for file in manifest.files:
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files.folder / file.name, folder / file.name)
    # Beside the whole files: one that is missing, and one of another size that began to arrive.
    first, second = (file for file in manifest.files if file.name.startswith(("model-00002", "model-00003")))
    (folder / first.name).unlink()
    Store(folder, plan.identity).part(second).write_bytes((folder / second.name).read_bytes()[:began])
    (folder / second.name).write_bytes(b"x")
    missing = first.size + second.size - began
    free = store_module.SPARE_BYTES + missing + room
    monkeypatch.setattr(store_module.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
    if room:
        with pytest.raises(WeightsError, match="still to come") as caught:
            stage(plan)
        assert caught.value.cause is Cause.DISK_FULL
    else:
        assert stage(plan)[0] == missing
        assert same_files(files.folder, folder)


def test_nothing_is_written_any_more_once_it_has_failed(plan: WeightsPlan, files: FileServer) -> None:
    """The lock of the directory is free again: another process may stage into it."""
    files.pace = 1e6
    files.answer = lambda request: (
        web.Response(status=403) if SHARD in request.path and request.method == "GET" else None
    )
    with pytest.raises(WeightsError):
        stage(plan)

    def found() -> dict[Path, tuple[int, int]]:
        stats = {path: path.stat() for path in Path(plan.path).rglob("*")}
        return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}

    left = found()
    assert any(path.suffix == ".part" for path in left), "others were on their way"
    time.sleep(1.0)
    assert found() == left


@pytest.mark.parametrize("policy", list(PageCache))
def test_a_full_disk_is_named_and_received_bytes_are_kept(
    plan: WeightsPlan, files: FileServer, policy: PageCache
) -> None:
    plan = plan.model_copy(update={"page_cache": policy})
    # A separate mount namespace: other users than root create it in a user namespace, and it leaves no remains.
    own = ["--user", "--map-root-user"] if os.geteuid() else []
    script = str(Path(__file__).with_name("full_disk.py"))
    done = subprocess.run(
        ["unshare", "--mount", *own, sys.executable, script, plan.to_json(), str(files.folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert re.search("became full while weights were written.*make room", found["message"])
    assert found["cause"] == Cause.DISK_FULL
    assert found["kept"] > 5_000_000
    assert found["fetched"] < 9_900_000 - found["kept"] + 2**20
    assert found["same"]


def test_the_bandwidth_limit_holds(plan: WeightsPlan, files: FileServer) -> None:
    begun = time.monotonic()
    fetched, _ = stage(plan.model_copy(update={"bandwidth_bytes": 8_000_000}))
    took = time.monotonic() - begun
    assert 0.8 * fetched / 8_000_000 <= took <= 60


@pytest.mark.parametrize("streams", [1, 2])
def test_no_more_files_come_at_once_than_allowed(plan: WeightsPlan, files: FileServer, streams: int) -> None:
    files.pace = 20e6
    stage(plan.model_copy(update={"streams": streams}))
    assert files.most_open == streams
    assert same_files(files.folder, Path(plan.path))


def test_unified_memory_keeps_no_file_in_the_page_cache(plan: WeightsPlan) -> None:
    stage(plan.model_copy(update={"page_cache": PageCache.UNIFIED}))
    shard = Path(plan.path) / SHARD
    # Its header was read again, and the kernel reads ahead: 512 KiB of 3.1 MiB with Python 3.14's buffers.
    assert cached_share(shard) < 0.25


def test_a_directory_without_sums_is_explained(plan: WeightsPlan, files: FileServer) -> None:
    (files.folder / "SHA256SUMS").unlink()
    with pytest.raises(WeightsError, match=r"xargs -0 sha256sum > SHA256SUMS"):
        stage(plan)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", ".dsv4/lock"])
def test_names_that_leave_the_directory_are_refused(plan: WeightsPlan, files: FileServer, name: str) -> None:
    from dsv4_runtime.weights.checkpoint import ManifestFile

    with pytest.raises(ValueError, match=r"not a relative file name|leaves the directory"):
        ManifestFile(name=name, size=1)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_list_of_files_without_end_is_refused(plan: WeightsPlan, files: FileServer, compressed: bool) -> None:
    """A few hundred kilobytes of gzip expand to hundreds of megabytes."""
    size = 300 << 20
    bomb = gzip.compress(b"\n" * size) if compressed else b""

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(size >> 20):
            yield b"\n" * (1 << 20)

    def answer(request: web.Request) -> web.Response | None:
        if "SHA256SUMS" not in request.path:
            return None
        if compressed:
            return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})
        return web.Response(body=endless())

    files.answer = answer
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightsError, match=r"SHA256SUMS: 'utf-8' codec|has more than 64 MiB"):
        stage(plan)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 250, f"{grown:.0f} MiB more"


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_special_files_in_place_of_weights_are_replaced_and_not_followed(
    plan: WeightsPlan, files: FileServer, tmp_path: Path, kind: str
) -> None:
    stage(plan)
    shard, outside = Path(plan.path) / SHARD, tmp_path / "outside"
    shard.rename(outside)
    if kind == "link":
        # Even a link to the same bytes is refused: its target can be replaced by another file.
        shard.symlink_to(outside)
    else:
        os.mkfifo(shard)
    before = outside.read_bytes()
    stage(plan)
    assert shard.lstat().st_nlink == 1
    assert shard.is_file()
    assert not shard.is_symlink()
    assert shard.read_bytes() == before == outside.read_bytes()


def test_a_part_that_is_a_link_is_not_written_through(plan: WeightsPlan, files: FileServer, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    # Names of parts require the list of files.
    stage(plan)
    store = Store(Path(plan.path), plan.identity)
    manifest = store.manifest()
    assert manifest is not None
    (file,) = (file for file in manifest.files if file.name == SHARD)
    (Path(plan.path) / SHARD).unlink()
    store.part(file).symlink_to(victim)
    with pytest.raises(WeightsError, match="it is a link; put the file itself there"):
        stage(plan)
    assert victim.read_text() == "mine"


def flip(path: Path) -> None:
    """Change one bit of a file without a change of its size, times and inode."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size - 1)
        (byte,) = file.read(1)
        file.seek(before.st_size - 1)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_doubted_files_are_read_again_and_a_wrong_one_is_fetched_again(plan: WeightsPlan, files: FileServer) -> None:
    stage(plan)
    folder = Path(plan.path)
    flip(folder / SHARD)
    assert staging.stage(StagingJob(weights=plan), lambda _: None) == staging.StagingResult(), "no marker shows it"
    assert not same_files(files.folder, folder)
    store_module.request_recheck(folder, "the first completion failed")
    done = staging.stage(StagingJob(weights=plan), lambda _: None)
    assert (done.verified, done.wrong) == (True, (SHARD,))
    assert done.fetched == (folder / SHARD).stat().st_size
    assert same_files(files.folder, folder)
    assert store_module.recheck_reason(folder) is None
    assert staging.stage(StagingJob(weights=plan), lambda _: None) == staging.StagingResult(), "once is enough"


def test_files_that_are_right_are_verified_and_not_fetched(plan: WeightsPlan) -> None:
    stage(plan)
    store_module.request_recheck(Path(plan.path), "the first completion failed")
    assert staging.stage(StagingJob(weights=plan), lambda _: None) == staging.StagingResult(verified=True)


def test_a_requested_recheck_is_kept_after_a_failed_staging(plan: WeightsPlan, files: FileServer) -> None:
    stage(plan)
    folder = Path(plan.path)
    flip(folder / SHARD)
    files.damage[SHARD] = 99
    store_module.request_recheck(folder, "the first completion failed")
    with pytest.raises(WeightsError) as caught:
        stage(plan)
    assert caught.value.cause is Cause.WEIGHTS_CORRUPT
    assert store_module.recheck_reason(folder) == "the first completion failed"
