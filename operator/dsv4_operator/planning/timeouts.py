"""Time limits of a start and of one step of the engine."""

from __future__ import annotations

import math

from dsv4_operator.planning.catalog import NANO
from dsv4_operator.planning.setup import Setup
from dsv4_runtime.contract import Reading, Timeouts

_PREFLIGHT_SECONDS = 30.0
_CPU_EXECUTE_SECONDS, _CPU_FIRST_TOKEN_SECONDS = 300.0, 120.0
_EXECUTE_SECONDS = 900.0
"""A step that compiles on a cold machine took longer than the 300 s of vLLM's default; 900 to 1800 s are in use."""
_DISK_BYTES_PER_SECOND = 1e9
"""Assumed before measurement; NVMe drives read several times as fast."""
_DOWNLOAD_BYTES_PER_SECOND = 10e6
_COMPILE_SECONDS = 1200.0
"""Kernels, graphs and warm-up on a machine without any cache: 5 to 13 minutes for Flash, 12 for Pro."""
_WARM_SECONDS = 180.0
"""The same with the caches of an earlier start."""
_SLACK = 2.0
_STAGING_SECONDS = 120.0


def timeouts(chosen: Setup) -> Timeouts:
    """Return the time limits of a start in seconds: those of the specification, else from the size of the checkpoint.

    If a disk is slower than assumed here, the agent of the head extends the limit of the load accordingly.
    """
    given = chosen.spec.engine.timeouts
    source = chosen.spec.model.source
    size = chosen.model.checkpoint_bytes
    reading = size / _DISK_BYTES_PER_SECOND
    if chosen.on_cpu:
        staging, load, first_token = NANO.staging_seconds, NANO.load_seconds, _CPU_FIRST_TOKEN_SECONDS
    else:
        download = 0.0 if source.path is not None else size / _DOWNLOAD_BYTES_PER_SECOND
        staging = math.ceil(_STAGING_SECONDS + _SLACK * reading + download)
        load = math.ceil(_COMPILE_SECONDS + _SLACK * reading)
        first_token = execute_model_seconds(chosen) + 60.0
    adjust_load = not given.load and not chosen.on_cpu
    return Timeouts(
        preflight=_PREFLIGHT_SECONDS,
        staging=given.staging or staging,
        formation=given.formation,
        load=given.load or load,
        reading=Reading(size=size, bytes_per_second=_DISK_BYTES_PER_SECOND, slack=_SLACK) if adjust_load else None,
        first_token=given.first_token or first_token,
        drain=given.drain,
    )


def execute_model_seconds(chosen: Setup) -> float:
    """Return the time limit of one step of the engine in seconds."""
    given = chosen.spec.engine.timeouts.execute_model
    return given or (_CPU_EXECUTE_SECONDS if chosen.on_cpu else _EXECUTE_SECONDS)


def ready_seconds(chosen: Setup) -> float:
    """Return the expected duration of a start with the caches of an earlier one, in seconds."""
    if chosen.on_cpu:
        return NANO.ready_seconds
    return chosen.model.checkpoint_bytes / _DISK_BYTES_PER_SECOND + _WARM_SECONDS
