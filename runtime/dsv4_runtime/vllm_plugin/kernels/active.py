"""The choice that is in force in this process, and the plans that are to be compiled before vLLM serves."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsv4_runtime.contract.kernels import (
    ALL_BUNDLED,
    VARIABLE,
    KernelChoice,
    KernelStanding,
    KernelStatus,
    Op,
    needs_evidence,
    parse_kernel_choice,
)

if TYPE_CHECKING:
    from dsv4_runtime.vllm_plugin.kernels.evidence import Standing

LOGGER = logging.getLogger("vllm.dsv4")
REPORT = "DSV4_KERNELS_REPORT"
"""Variable: a file that gets the choice and the evidence behind it, as JSON."""
MOST_COMPILERS = 16
"""Processes, or threads, that compile at once at most."""
_REASON_LENGTH = 200
# Of a reason in a line of the log, which the agent reads up to 4096 characters.
_PLANS: dict[Hashable, Any] = {}
_WARMED: set[Hashable] = set()
_TOKENS = [0]
_ROWS = [1]


def possible(op: Op) -> bool:
    """Tell whether `op` may be computed by a bundled kernel in this process, whatever the evidence says."""
    return parse_kernel_choice(os.environ.get(VARIABLE), ALL_BUNDLED).bundled(op)


@functools.cache
def choice() -> KernelChoice:
    """Return the choice of this process. Call it where vLLM's configuration is set, as it is while a model is made."""
    _note_tokens()
    text = os.environ.get(VARIABLE)
    if not needs_evidence(text):
        found, report = (
            parse_kernel_choice(text),
            {"choice": {str(op): parse_kernel_choice(text).provider(op) for op in Op}},
        )
        standings: tuple[Standing, ...] = ()
    else:
        from vllm.config import get_current_vllm_config

        from dsv4_runtime.vllm_plugin.kernels.evidence import SIZES
        from dsv4_runtime.vllm_plugin.kernels.trial import evidence

        config = get_current_vllm_config()
        model = {name: getattr(config.model_config.hf_config, name) for name in SIZES}
        seen = evidence(model, config.parallel_config.tensor_parallel_size)
        found = parse_kernel_choice(text, seen.choice)
        report = {**seen.to_dict(), "choice": {str(op): found.provider(op) for op in Op}}
        standings = seen.standings
        for standing in filter(_tried, standings):
            if standing.excluded is not None:
                LOGGER.warning(
                    "dsv4 kernels: %s of %s is not used: %s", standing.provider, standing.op, standing.excluded
                )
    LOGGER.info("dsv4 kernels: %s", found)
    for line in report_lines(found, standings, _rank()):
        LOGGER.info("%s", line)
    if place := os.environ.get(REPORT):
        Path(place).write_text(json.dumps(report))
    return found


def report_lines(found: KernelChoice, standings: Iterable[Standing], rank: int) -> list[str]:
    """Return what the agent reads of the choice (`dsv4_runtime.engine.logs`): a line with JSON for each operation.

    One line with everything would be longer than the agent reads.
    """
    by: dict[Op, list[KernelStanding]] = {op: [] for op in Op}
    for standing in filter(_tried, standings):
        slowness = standing.slowness and round(standing.slowness, 3)
        reason = standing.excluded and " ".join(standing.excluded.split())[:_REASON_LENGTH]
        by[standing.op].append(KernelStanding(provider=standing.provider, slowness=slowness, excluded=reason))
    told = [KernelStatus(op=op, provider=found.provider(op), standings=tuple(by[op])) for op in Op]
    return [f"dsv4 kernels of rank {rank}: {one.to_json()}" for one in told]


def _tried(standing: Standing) -> bool:
    """Tell whether the provider is there at all."""
    return standing.excluded is None or not standing.excluded.partition(": ")[2].startswith("not here")


def _rank() -> int:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return 0 if config is None else int(config.parallel_config.rank)


def most_tokens(at_least: int) -> int:
    """Return the most tokens of a step, as the model's layers were made for, or `at_least` if that is more."""
    return max(at_least, _TOKENS[0])


def most_rows(at_least: int) -> int:
    """Return the most tokens that a step has of a request that decodes, its drafts included, or `at_least`."""
    return max(at_least, _ROWS[0])


def _note_tokens() -> None:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None:
        capture = config.compilation_config.max_cudagraph_capture_size or 0
        _TOKENS[0] = max(config.scheduler_config.max_num_batched_tokens, capture)
        drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        _ROWS[0] = 1 + drafts


def shared_plan(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return the plan called `key`, made by the first caller.

    Layers of one kind run one after another on one stream, so that they may share its buffers. A kernel that runs on a
    stream of its own beside others needs a key of its own.
    """
    if key not in _PLANS:
        _PLANS[key] = make()
    return _PLANS[key]


@contextlib.contextmanager
def without_keeping_plans() -> Iterator[None]:
    """Forget the plans that are made inside."""
    kept = dict(_PLANS)
    try:
        yield
    finally:
        _PLANS.clear()
        _PLANS.update(kept)


def warm_up() -> int:
    """Compile every variant of every plan that is not compiled yet, side by side; return how many plans that were.

    Triton compiles outside of Python's lock for the greater part. Each plan is warmed by one thread, on the stream of
    the caller: its launches follow one another, and plans share no buffers.
    """
    fresh = [key for key in _PLANS if key not in _WARMED]
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def compile_plan(key: Hashable) -> None:
        on_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.inference_mode(), on_stream:
            _PLANS[key].warmup()

    with ThreadPoolExecutor(max_workers=min(len(fresh), MOST_COMPILERS, os.cpu_count() or 1) or 1) as pool:
        list(pool.map(compile_plan, fresh))
    _WARMED.update(fresh)
    return len(fresh)
