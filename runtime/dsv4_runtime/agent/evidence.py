"""Evidence of an engine's death, saved before recovery removes it: causes of the death, never the contents of requests.

One JSON file a death, written by rank 0 before a restart in place. No text of clients gets into it: lines of logs have
passed `util.log_lines`, and of the metrics only vLLM's own numbers are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from dsv4_runtime.agent.context import run_in_daemon_thread
from dsv4_runtime.contract import Cause, Failure, GroupPlan
from dsv4_runtime.engine import token_auth

BOUND_SECONDS = 15.0
"""Bound of the delay of a recovery."""
KEEP = 10
"""Number of deaths with evidence, of all levels; a restart loop must not fill the disk."""

_QUESTION = aiohttp.ClientTimeout(total=2.0)
_ACTORS = 100
# Part of the bound that is reserved for writing.
_WRITE_SECONDS = 5.0
# Tolerance for the clocks of file servers.
_CLOCK_SECONDS = 60.0

_log = logging.getLogger(__name__)


async def save(
    root: Path,
    plan: GroupPlan,
    failure: Failure,
    own: Mapping[str, object],
    token: str,
    window: Sequence[Mapping[str, object]] = (),
) -> Path | None:
    """Write the evidence of `failure` below `root`, which outlives the incarnation and keeps the newest `KEEP`. Never
    raises; return None if it could not be written within `BOUND_SECONDS`.

    `own` is the evidence of rank 0 (`AgentContext.evidence`), `window` the samples of the verdict, oldest first.
    """
    begun = time.monotonic()
    end = begun + BOUND_SECONDS
    found: dict[str, object] = {"failure": failure.to_dict(), "ranks": {"0": own}, "window": list(window)}
    try:
        async with asyncio.timeout(BOUND_SECONDS - _WRITE_SECONDS), _session(token) as session:
            parts = await asyncio.gather(
                _ranks(session, plan, failure, found),
                _ray(session, plan, found),
                _metrics(session, plan, found),
                _nccl(plan, found),
                return_exceptions=True,
            )
            if wrong := [_reason(error) for error in parts if isinstance(error, BaseException)]:
                found["incomplete"] = "; ".join(wrong)
    except TimeoutError:
        found["incomplete"] = f"not all evidence was received within {BOUND_SECONDS - _WRITE_SECONDS:.0f} s"
    found["seconds"] = round(time.monotonic() - begun, 3)
    name = f"{plan.incarnation}-g{failure.generation}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    try:
        async with asyncio.timeout(end - time.monotonic()):
            return await run_in_daemon_thread(_write, root, name, found)
    except TimeoutError:
        _log.warning("the evidence of %s was not written after %.0f s", failure.cause, time.monotonic() - begun)
    except Exception as error:
        # Any error: a group must not end because its evidence cannot be saved.
        _log.warning("the evidence of %s could not be written: %s", failure.cause, error)
    return None


def retain(root: Path, new: Path | None = None) -> None:
    """Remove all but the newest, including `new`. A time in the future is from a wrong clock and counts as old."""
    now = time.time() + _CLOCK_SECONDS

    def age(path: Path) -> tuple[bool, float]:
        try:
            written = path.stat().st_mtime
        except OSError:
            return False, 0.0
        return path == new, written if written <= now else 0.0

    for old in sorted(root.iterdir(), key=age)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def _write(root: Path, name: str, found: Mapping[str, object]) -> Path:
    target = root / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "evidence.json").write_text(json.dumps(found, indent=2, default=str) + "\n")
    with contextlib.suppress(OSError):
        retain(root, target)
    return target


def _session(token: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=_QUESTION, headers={"Authorization": f"Bearer {token}", **token_auth.headers(token)}
    )


async def _ranks(session: aiohttp.ClientSession, plan: GroupPlan, failure: Failure, found: dict[str, object]) -> None:
    """Collect the evidence of every other member. A lost member is skipped, because its loss is reported only
    afterwards."""
    gone = failure.culprit_rank if failure.cause in (Cause.NODE_LOST, Cause.AGENT_HUNG) else None
    ranks = found["ranks"]
    assert isinstance(ranks, dict)  # noqa: S101

    async def ask(rank: int, url: str) -> None:
        ranks[str(rank)] = await _json(session, url)

    await asyncio.gather(
        *(
            ask(member.rank, f"http://{member.address}:{member.ports.agent}/v1/evidence")
            for member in plan.members
            if member.rank not in (0, gone)
        )
    )


async def _ray(session: aiohttp.ClientSession, plan: GroupPlan, found: dict[str, object]) -> None:
    """Collect actors, nodes and placement groups with causes of death from Ray's state API (`/api/v0`)."""
    if not plan.head.ray_args:
        return
    base = f"http://{plan.head.address}:{plan.head.ports.dashboard}/api/v0"
    actors, nodes, placement = await asyncio.gather(
        _json(session, f"{base}/actors?detail=1&limit={_ACTORS}"),
        _json(session, f"{base}/nodes?detail=1"),
        _json(session, f"{base}/placement_groups?detail=1"),
    )
    found["ray"] = {"actors": _rows(actors), "nodes": _rows(nodes), "placementGroups": _rows(placement)}


async def _metrics(session: aiohttp.ClientSession, plan: GroupPlan, found: dict[str, object]) -> None:
    """Collect vLLM's counters, if its API process still answers."""
    try:
        async with session.get(f"http://{plan.head.address}:{plan.head.ports.api}/metrics") as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        found["metrics"] = {"error": _reason(error)}
    else:
        found["metrics"] = [line for line in text.splitlines() if line.startswith("vllm:") and "_bucket" not in line]


async def _nccl(plan: GroupPlan, found: dict[str, object]) -> None:
    """Collect NCCL's report on its ranks: ranks that do not answer, and ranks that began fewer operations than the
    others."""
    if not plan.health.gpus:
        return
    try:
        found["nccl"] = (await nccl_report(RAS_PORT)).splitlines()
    except OSError as error:
        found["nccl"] = {"error": _reason(error)}


async def _json(session: aiohttp.ClientSession, url: str) -> object:
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            return await response.json()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return {"error": _reason(error)}


def _rows(answer: object) -> object:
    """Return the rows of a response of Ray's state API, which nests them three deep; otherwise the response itself."""
    inner = answer
    for key in ("data", "result", "result"):
        if not isinstance(inner, dict) or key not in inner:
            return answer
        inner = inner[key]
    return inner


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


RAS_PORT = 28028
"""Default port of NCCL: on each machine the first process that uses NCCL listens there, on loopback only."""
RAS_SECONDS = 5.0
_PEERS_SECONDS = 3
_MOST_BYTES = 1 << 18


async def nccl_report(port: int = RAS_PORT, seconds: float = RAS_SECONDS) -> str:
    """Return NCCL's verbose status: its communicators, ranks that do not answer, and the operations that each began.

    Args:
        port: port of a worker's RAS thread on this machine.
        seconds: bound of the wait; a stopped process accepts the connection and never answers.

    Raises:
        OSError: no thread listens there, or it did not answer in time.
    """
    said = bytearray()
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                # Seconds until NCCL reports a peer as not answering; its default is longer.
                writer.write(f"timeout {_PEERS_SECONDS}\nverbose status\n".encode())
                while (part := await reader.read(1 << 16)) and len(said) < _MOST_BYTES:
                    said += part
            finally:
                writer.close()
    except TimeoutError:
        # A partial answer is kept.
        pass
    text = said[:_MOST_BYTES].decode(errors="replace").removeprefix("OK\n")
    if not text:
        raise TimeoutError(f"NCCL's RAS sent nothing within {seconds:g} s")
    return text
