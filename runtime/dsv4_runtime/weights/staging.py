"""Staging of one checkpoint on one member, from the origin and from other members."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from dsv4_runtime.contract import Cause, PageCache, Verify, WeightsSource
from dsv4_runtime.weights import checkpoint, shared, writer
from dsv4_runtime.weights.checkpoint import (
    CheckpointManifest,
    ManifestFile,
    NotAsDescribedError,
    TransientError,
    WeightsError,
)
from dsv4_runtime.weights.members import MemberWeights, StagingJob, StagingReport, StagingState, fetches_from_origin
from dsv4_runtime.weights.origins import Origin, open_origin
from dsv4_runtime.weights.store import Store, check_free_space, clear_recheck, disk_errors, recheck_reason
from dsv4_runtime.weights.transfer import Members, MemberSource, Source, TransferContext, fetch, verify_file
from dsv4_runtime.weights.writer import Limiter, Meter, human

_TICK_SECONDS = 0.5
# Time the first member waits for the others before it contacts the origin: one of them may have all files.
_GATHER_SECONDS = 10.0
_MEMBER_PAUSE_SECONDS = 5.0
_END_SECONDS = 5.0
# Consecutive attempts without progress: an origin may be unavailable for two minutes; member files have other sources.
_SOURCE_TRIES, _MEMBER_TRIES = 10, 3


@dataclass(frozen=True, slots=True)
class StagingResult:
    """Result of a completed staging."""

    fetched: int = 0
    """Bytes."""
    verified: bool = False
    """Whether the content of all files was verified."""
    wrong: tuple[str, ...] = ()
    """Files with wrong content, which were fetched again."""


def stage(job: StagingJob, report: Callable[[StagingReport], None]) -> StagingResult:
    """Make the plan's directory contain the checkpoint; return the work done.

    A checkpoint that is complete by its marker is not read, and no source is contacted, unless a recheck is requested.

    Raises:
        WeightsError: the checkpoint is unavailable; names problem, location and remedy.
    """
    plan = job.weights
    folder = Path(plan.path)
    if plan.source is WeightsSource.PATH:
        checkpoint.check_files(folder, "put a whole checkpoint there, or let dsv4 fetch one")
        return StagingResult()
    store = Store(folder, plan.identity, plan.shared)
    if plan.verify is Verify.MARKER and recheck_reason(folder) is None and _complete(store):
        return StagingResult()

    def blocked() -> None:
        report(
            StagingReport(
                stage="another process stages into the same directory",
                stance=StagingState.BLOCKED,
                percent=_done(store),
            )
        )

    with store.lock(blocked):
        again = plan.verify is Verify.FULL or recheck_reason(folder) is not None
        if not again and _complete(store):
            return StagingResult()
        work = _Staging(job, store, report)
        wrong = work.read_again() if again else ()
        work.run()
        checkpoint.check_files(folder, "the source itself lacks it: choose another revision or directory")
        clear_recheck(folder)
        return StagingResult(work.context.meter.total, again, wrong)


def _complete(store: Store) -> bool:
    manifest = store.manifest()
    return manifest is not None and len(store.finished(manifest)) == len(manifest.files)


def _done(store: Store) -> float | None:
    manifest = store.manifest()
    return min(100.0, 100 * store.held(manifest) / max(1, manifest.size)) if manifest else None


class _Staging:
    """Staging by the process that holds the directory's lock."""

    def __init__(self, job: StagingJob, store: Store, report: Callable[[StagingReport], None]) -> None:
        self._job = job
        self._plan = job.weights
        self._store = store
        self._report = report
        self._stop = False
        self.context = TransferContext(Limiter(self._plan.bandwidth_bytes), Meter(), lambda: self._stop)
        self._members = Members(job.members if self._plan.from_members else {}, job.token, self._plan.identity)
        self._origin: Origin | None = None
        self._begun = time.monotonic()
        self._claimed = False
        self._manifest: CheckpointManifest | None = None
        self._finished: set[str] = set()
        self._running: dict[Future[None], tuple[ManifestFile, Source]] = {}
        self._wrong: dict[str, str] = {}
        """Complete files with wrong content, and the difference."""
        self._refused: set[tuple[str, int]] = set()
        """Excluded pairs of file and rank."""
        self._paused: dict[int, float] = {}
        """Monotonic time until which a rank is not used."""

    def read_again(self) -> tuple[str, ...]:
        """Verify all finished files; remove and return the wrong ones, which are fetched again."""
        manifest = self._store.manifest()
        if manifest is None:
            return ()
        noted = self._store.finished(manifest)
        read, total = 0, sum(file.size for file in manifest.files if file.name in noted)
        bad = set()
        for file in manifest.files:
            if file.name in noted:
                percent = 100 * read / max(1, total)
                self._report(
                    StagingReport(stage=f"reading {file.name} again", percent=percent, stance=StagingState.ACTIVE)
                )
                path = self._store.file(file.name)
                if verify_file(file, path, self.context, noted[file.name].sha256) is None:
                    bad.add(file.name)
                self._leave_cache(path)
                read += file.size
        if bad:
            self._store.forget(bad)
            for name in bad:
                (self._store.folder / name).unlink(missing_ok=True)
        return tuple(sorted(bad))

    def run(self) -> None:
        """Fetch missing files until the checkpoint is complete."""
        pool = ThreadPoolExecutor(self._plan.streams, "fetch")
        try:
            while not self._step(pool):
                if self._running:
                    wait(self._running, _TICK_SECONDS, FIRST_COMPLETED)
                else:
                    time.sleep(_TICK_SECONDS)
                self._process_results()
        finally:
            self._stop = True
            pool.shutdown(wait=False, cancel_futures=True)
            # The lock must be held until all writes end. Silent sources are not awaited.
            wait(self._running, _END_SECONDS)

    def _step(self, pool: ThreadPoolExecutor) -> bool:
        """Start possible transfers; return True when the checkpoint is complete."""
        offers = self._members.offers()
        held = self._store.held(self._manifest) if self._manifest else 0
        self._claimed = self._fetches_from_origin(held, offers)
        if self._manifest is None:
            self._find_manifest(offers)
        manifest = self._manifest
        if manifest is None:
            self._report_progress("waiting for the member that fetches from the origin", None, held)
            return False
        if len(self._finished) == len(manifest.files):
            return True
        busy = {file.name for file, _ in self._running.values()}
        for file in manifest.files:
            if len(self._running) >= self._plan.streams:
                break
            if file.name in self._finished or file.name in busy:
                continue
            source, sha256 = self._source(file, offers)
            if source is not None:
                check_free_space(self._store, manifest.size - self._store.held(manifest, unverified=True))
                self._running[pool.submit(self._fetch, file, sha256, source)] = (file, source)
        sources = sorted({source.name for _, source in self._running.values()})
        sources_text = f" from {', '.join(sources)}" if sources else ", waiting for other members"
        self._report_progress(
            f"fetched {len(self._finished)}/{len(manifest.files)} files, {human(held)} of {human(manifest.size)}, "
            f"{human(self.context.meter.rate())}/s{sources_text}",
            100 * held / max(1, manifest.size),
            held,
        )
        return False

    def _report_progress(self, text: str, percent: float | None, held: int) -> None:
        percent = None if percent is None else min(100.0, percent)
        fetched = self.context.meter.total
        self._report(
            StagingReport(
                stage=text,
                percent=percent,
                stance=StagingState.ACTIVE,
                claimed=self._claimed,
                held=held,
                fetched=fetched,
            )
        )

    def _fetches_from_origin(self, held: int, offers: dict[int, MemberWeights]) -> bool:
        here = [offer for offer in offers.values() if offer.stance is not StagingState.AWAY]
        gathering = time.monotonic() - self._begun < _GATHER_SECONDS
        if gathering and not self._claimed and len(here) < len(self._members.sources):
            return False
        return fetches_from_origin(self._job.rank, held, self._claimed, offers)

    def _find_manifest(self, offers: dict[int, MemberWeights]) -> None:
        found = None
        for rank in offers:
            # All members use one manifest, even if the origin changes.
            found = found or self._members.sources[rank].manifest()
        if found is None and self._claimed:
            self._report_progress(f"asking {self._open_origin().name} for the list of files", None, 0)
            found = self._open_origin().manifest()
        if found is not None and found.identity == self._plan.identity:
            self._store.note_manifest(found)
            self._link_shared_files(found)
            self._manifest = found
            self._finished = set(self._store.finished(found))

    def _link_shared_files(self, manifest: CheckpointManifest) -> None:
        """Link the node's shared files after verification, instead of fetching them."""
        store, noted = self._plan.shared, self._store.finished(manifest)
        if store is None:
            return
        there = [
            (file, file.sha256)
            for file in manifest.files
            if file.name not in noted and file.sha256 and shared.shared_file(Path(store), file.sha256).is_file()
        ]
        if not there:
            return
        self._report_progress(f"reading {len(there)} files of {store}", None, 0)
        with ThreadPoolExecutor(self._plan.streams, "read") as pool:
            right = pool.map(
                lambda one: verify_file(one[0], shared.shared_file(Path(store), one[1]), self.context), there
            )
            for (file, sha256), found in zip(there, right, strict=True):
                if found is not None:
                    with disk_errors(self._store.folder):
                        shared.link_shared(Path(store), sha256, self._store.folder / file.name)
                    self._store.note(file, found)
                    self._leave_cache(self._store.folder / file.name)

    def _open_origin(self) -> Origin:
        if self._origin is None:
            self._origin = open_origin(self._plan)
        return self._origin

    def _source(self, file: ManifestFile, offers: dict[int, MemberWeights]) -> tuple[Source | None, str | None]:
        """Return a source of `file`, and its SHA-256 if a member provides it."""
        now = time.monotonic()
        holders = [
            rank
            for rank, offer in sorted(offers.items())
            if file.name in offer.files
            and (file.name, rank) not in self._refused
            and self._paused.get(rank, 0.0) <= now
        ]
        if holders:
            # Distribute the members over the sources.
            rank = holders[(self._job.rank + len(self._finished)) % len(holders)]
            return self._members.sources[rank], offers[rank].files[file.name]
        useless = any((file.name, rank) in self._refused for rank in offers)
        return (self._open_origin() if self._claimed or useless else None), None

    def _fetch(self, file: ManifestFile, sha256: str | None, source: Source) -> None:
        path = self._store.file(file.name)
        if file.sha256 or file.git_blob or sha256:
            # Left by a process killed between renaming a file and recording it.
            found = verify_file(file, path, self.context, sha256)
            if found is not None:
                self._store.note(file, found)
                return
        tries = _MEMBER_TRIES if isinstance(source, MemberSource) else _SOURCE_TRIES
        direct = self._plan.page_cache is PageCache.UNIFIED
        found = fetch(file, sha256, self._store.part(file), source, self.context, tries, direct=direct)
        self._store.finish(file, found)
        self._leave_cache(path)

    def _leave_cache(self, path: Path) -> None:
        if self._plan.page_cache is PageCache.UNIFIED:
            writer.drop([path])

    def _process_results(self) -> None:
        """Process the results of ended transfers."""
        for future in [future for future in self._running if future.done()]:
            file, source = self._running.pop(future)
            rank = source.rank if isinstance(source, MemberSource) else None
            try:
                future.result()
                self._finished.add(file.name)
            except NotAsDescribedError as error:
                if file.name in self._wrong:
                    raise WeightsError(
                        f"{error}, also after it was fetched again (before: {self._wrong[file.name]}); the copy at "
                        "the source or the network on the way damages it: compare the file there with its SHA-256",
                        Cause.WEIGHTS_CORRUPT,
                    ) from error
                self._wrong[file.name] = str(error)
                if rank is not None:
                    self._refused.add((file.name, rank))
            except TransientError as error:
                if rank is None:
                    raise WeightsError(
                        f"{error}; received data is kept, and the next attempt continues there"
                    ) from error
                self._paused[rank] = time.monotonic() + _MEMBER_PAUSE_SECONDS
            except WeightsError as error:
                if error.cause is not Cause.DISK_FULL and file.name in self._wrong:
                    before = self._wrong[file.name]
                    raise WeightsError(f"{before}; fetching it again: {error}", Cause.WEIGHTS_CORRUPT) from error
                if rank is None or error.cause is Cause.DISK_FULL:
                    raise
                self._refused.add((file.name, rank))
