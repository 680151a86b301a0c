"""The choice that is in force in this process, and the plans that are to be compiled before vLLM serves."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsv4_runtime.contract.kernels import (
    ALL_BUNDLED,
    OFF,
    VARIABLE,
    KernelChoice,
    KernelStatus,
    Op,
    ProviderStatus,
    needs_evidence,
    parse_kernel_choice,
)

if TYPE_CHECKING:
    from dsv4_runtime.vllm_plugin.kernels.evidence import Standing
    from dsv4_runtime.vllm_plugin.kernels.trial import Evidence

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
    """Return the choice of this process. Call it where vLLM's configuration is set, as it is while a model is made.

    It is `OFF` where `refuses` has a reason, and leaves out operations whose hooks are not all attached.
    """
    _note_tokens()
    text = os.environ.get(VARIABLE)
    if not any(map(possible, Op)):
        return _told(parse_kernel_choice(text, OFF), ())
    config = _config()
    reason = "vLLM's configuration is not set" if config is None and needs_evidence(text) else None
    if config is not None:
        reason = refuses(config.parallel_config, config.load_config) or unknown_model(config.model_config)
    if reason is not None:
        LOGGER.warning("dsv4 kernels: %s=%s has no effect, all operations are vLLM's own: %s", VARIABLE, text, reason)
        return _told(OFF, ())
    from dsv4_runtime.vllm_plugin.kernels.hooks import ATTACHED

    if not needs_evidence(text):
        return _told(ATTACHED.agreed(parse_kernel_choice(text)), ())
    try:
        seen = _evidence(config)
    except Exception as error:
        named = parse_kernel_choice(text, OFF)
        LOGGER.warning("dsv4 kernels: no choice by evidence (%s: %s)", type(error).__name__, error)
        return _told(ATTACHED.agreed(named), ())
    if absent := sorted({standing.provider for standing in seen.standings if not _tried(standing)}):
        LOGGER.info("dsv4 kernels: not here: %s", ", ".join(absent))
    for standing in filter(_tried, seen.standings):
        if standing.excluded is not None:
            LOGGER.warning("dsv4 kernels: %s of %s is not used: %s", standing.provider, standing.op, standing.excluded)
    return _told(ATTACHED.agreed(parse_kernel_choice(text, seen.choice)), seen.standings, seen.to_dict())


def refuses(parallel: Any, load: Any = None) -> str | None:
    """Return why nothing is bundled in an engine of this configuration; None if it may be.

    Args:
        parallel: vLLM's `ParallelConfig`.
        load: vLLM's `LoadConfig`, if there is one.
    """
    for there, what in (
        (
            getattr(parallel, "use_ubatching", False)
            or getattr(parallel, "enable_dbo", False)
            or getattr(parallel, "ubatch_size", 0) > 1,
            "a step is split into microbatches, which would share the buffers of the bundled kernels",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1
            or getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "contexts are spread over ranks, which the bundled kernels do not know",
        ),
        (
            getattr(load, "load_format", None) == "ipc_cache",
            "load format ipc_cache maps weights that another process laid out for vLLM's own kernels",
        ),
    ):
        if there:
            return what
    return None


def unknown_model(model: Any) -> str | None:
    """Return why the model that `model` (vLLM's `ModelConfig`) describes is not one of DeepSeek-V4; None if it is."""
    hf_config = getattr(model, "hf_config", None)
    names = getattr(hf_config, "architectures", None) or ()
    if names and not any("deepseekv4" in str(name).lower() for name in names):
        return f"the model is {', '.join(map(str, names))}, the kernels are DeepSeek-V4's"
    sizes = model_sizes(hf_config)
    if missing := sorted(name for name, size in sizes.items() if size is None):
        return f"the model's configuration has no {', '.join(missing)}"
    return None


def model_sizes(hf_config: Any) -> dict[str, int | None]:
    """Return the sizes of a model that the trials need; None where there is no positive integer."""
    from dsv4_runtime.vllm_plugin.kernels.evidence import SIZES

    found = {name: getattr(hf_config, name, None) for name in SIZES}
    return {
        name: size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
        for name, size in found.items()
    }


def _evidence(config: Any) -> Evidence:
    from dsv4_runtime.vllm_plugin.kernels.trial import evidence, large_products

    parallel = config.parallel_config
    redundant = getattr(getattr(parallel, "eplb_config", None), "num_redundant_experts", 0)
    return evidence(
        {name: size for name, size in model_sizes(config.model_config.hf_config).items() if size is not None},
        parallel.tensor_parallel_size,
        data_parallel=getattr(parallel, "data_parallel_size", 1),
        expert_parallel=bool(getattr(parallel, "enable_expert_parallel", False)),
        redundant_experts=redundant if getattr(parallel, "enable_eplb", False) else 0,
        large_products=large_products(),
    )


def _told(found: KernelChoice, standings: Iterable[Standing], report: Mapping[str, Any] | None = None) -> KernelChoice:
    """Log the choice `found` and write the report; return it."""
    LOGGER.info("dsv4 kernels: %s", found)
    for line in report_lines(found, standings, _rank()):
        LOGGER.info("%s", line)
    if place := os.environ.get(REPORT):
        try:
            Path(place).write_text(json.dumps({**(report or {}), "choice": {str(op): found.provider(op) for op in Op}}))
        except (OSError, ValueError) as error:
            LOGGER.warning("dsv4 kernels: %s=%s cannot be written: %s", REPORT, place, error)
    return found


def report_lines(found: KernelChoice, standings: Iterable[Standing], rank: int) -> list[str]:
    """Return what the agent reads of the choice (`dsv4_runtime.engine.logs`): a line with JSON for each operation.

    One line with everything would be longer than the agent reads.
    """
    by: dict[Op, list[ProviderStatus]] = {op: [] for op in Op}
    for standing in filter(_tried, standings):
        slowness = standing.slowness and round(standing.slowness, 3)
        reason = standing.excluded and " ".join(standing.excluded.split())[:_REASON_LENGTH]
        by[standing.op].append(ProviderStatus(provider=standing.provider, slowness=slowness, excluded=reason))
    told = [KernelStatus(op=op, provider=found.provider(op), standings=tuple(by[op])) for op in Op]
    return [f"dsv4 kernels of rank {rank}: {one.to_json()}" for one in told]


def _tried(standing: Standing) -> bool:
    """Tell whether the provider is there at all."""
    from dsv4_runtime.vllm_plugin.kernels.evidence import ABSENT

    return standing.excluded is None or not standing.excluded.partition(": ")[2].startswith(ABSENT)


def _config() -> Any:
    """Return vLLM's configuration, None where it is not set."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def _rank() -> int:
    config = _config()
    return 0 if config is None else int(config.parallel_config.rank)


def most_tokens(at_least: int) -> int:
    """Return the most tokens of a step, as the model's layers were made for, or `at_least` if that is more."""
    return max(at_least, _TOKENS[0])


def most_rows(at_least: int) -> int:
    """Return the most tokens that a step has of a request that decodes, its drafts included, or `at_least`."""
    return max(at_least, _ROWS[0])


def _note_tokens() -> None:
    config = _config()
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
