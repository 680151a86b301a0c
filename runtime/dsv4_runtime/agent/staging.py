"""Weights on this member: made, or found; whoever is second to ask waits for the first."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from dsv4_runtime.contract import WeightsPlan, WeightsSource


class StagingError(Exception):
    """The weights are not there and cannot be had; the text says why and what to do."""


async def stage(weights: WeightsPlan) -> None:
    """Make sure that `weights.path` holds a complete checkpoint.

    The nano checkpoint is made in a process of its own: torch is not for the agent's memory, and members that share a
    disk make it once, because its maker takes a lock.
    """
    path = Path(weights.path)
    if weights.source is WeightsSource.PATH:
        if not (path / "config.json").is_file():
            raise StagingError(f"weights.path {weights.path!r} has no config.json; put a checkpoint there")
        return
    command = [sys.executable, "-m", "dsv4_runtime.nano.main", weights.path]
    command += ["--seed", str(weights.seed or 0), "--precision", weights.precision or "bf16"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = output.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise StagingError(f"the nano checkpoint could not be made in {weights.path!r}: {last[0]}")
