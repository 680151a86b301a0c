"""The kernel choice of this process, and the registration of the hooks."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from dsv4_runtime.vllm_plugin.kernels import vllm_api
from dsv4_runtime.vllm_plugin.kernels.hooks import ATTACHED

if TYPE_CHECKING:
    from dsv4_runtime.vllm_plugin.kernels.evidence import Standing
    from dsv4_runtime.vllm_plugin.kernels.trial import Evidence

LOGGER = logging.getLogger("vllm.dsv4")
REPORT = "DSV4_KERNELS_REPORT"
"""Environment variable: a file for the choice and its evidence as JSON."""
MOST_COMPILERS = 16
"""Maximum number of concurrent compiling processes or threads."""
_REASON_LENGTH = 200
# Of a reason in a log line, of which the agent reads up to 4096 characters.
_TOKENS = [0]
_ROWS = [1]


def install() -> None:
    """Register the hooks whose operations may be bundled; each is attached after the import of its module.

    The replacements query the choice when a layer is made: only then the shapes are known.
    """
    anything = any(map(possible, Op))
    for hook in vllm_api.adapter().HOOKS:
        if any(map(possible, hook.ops)) if hook.ops else anything or not hook.bundled:
            ATTACHED.install(hook)


def first_reason(*cases: tuple[Any, str]) -> str | None:
    """Return the text of the first case whose condition holds, or None."""
    return next((reason for condition, reason in cases if condition), None)


@functools.cache
def warn_once(message: str, *values: str) -> None:
    """Log a warning once per process."""
    LOGGER.warning(message, *values)


def possible(op: Op) -> bool:
    """Return whether `op` may be bundled in this process, regardless of the evidence."""
    return parse_kernel_choice(os.environ.get(VARIABLE), ALL_BUNDLED).bundled(op)


@functools.cache
def choice() -> KernelChoice:
    """Return the choice of this process; requires vLLM's configuration, which is set while a model is made.

    It is `OFF` if `refuses` returns a reason, and excludes operations with unattached hooks.
    """
    _note_tokens()
    text = os.environ.get(VARIABLE)
    if not any(map(possible, Op)):
        return _reported(parse_kernel_choice(text, OFF), ())
    config = _config()
    reason = "vLLM's configuration is not set" if config is None and needs_evidence(text) else None
    if config is not None:
        reason = refuses(config.parallel_config, config.load_config) or unknown_model(config.model_config)
    if reason is not None:
        LOGGER.warning("dsv4 kernels: %s=%s has no effect, all operations are vLLM's own: %s", VARIABLE, text, reason)
        return _reported(OFF, ())
    if not needs_evidence(text):
        return _reported(ATTACHED.agreed(parse_kernel_choice(text)), ())
    try:
        seen = _evidence(config)
    except Exception as error:
        named = parse_kernel_choice(text, OFF)
        LOGGER.warning("dsv4 kernels: no choice by evidence (%s: %s)", type(error).__name__, error)
        return _reported(ATTACHED.agreed(named), ())
    if absent := sorted({standing.provider for standing in seen.standings if not _tried(standing)}):
        LOGGER.info("dsv4 kernels: not here: %s", ", ".join(absent))
    for standing in filter(_tried, seen.standings):
        if standing.excluded is not None:
            LOGGER.warning("dsv4 kernels: %s of %s is not used: %s", standing.provider, standing.op, standing.excluded)
    return _reported(ATTACHED.agreed(parse_kernel_choice(text, seen.choice)), seen.standings, seen.to_dict())


def choice_key() -> str:
    """Return the choice of this process as part of a key; nothing is reported where nothing may be bundled."""
    return str(choice() if any(map(possible, Op)) else OFF)


def refuses(parallel: Any, load: Any = None) -> str | None:
    """Return the reason why nothing is bundled in an engine of this configuration, or None.

    Args:
        parallel: vLLM's `ParallelConfig`.
        load: vLLM's `LoadConfig`, or None.
    """
    return first_reason(
        (
            getattr(parallel, "use_ubatching", False)
            or getattr(parallel, "enable_dbo", False)
            or getattr(parallel, "ubatch_size", 0) > 1,
            "a step is split into microbatches, which would share the buffers of the bundled kernels",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1
            or getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "contexts are spread over ranks, which the bundled kernels do not support",
        ),
        (
            getattr(load, "load_format", None) == "ipc_cache",
            "load format ipc_cache maps weights that another process laid out for vLLM's own kernels",
        ),
    )


def unknown_model(model: Any) -> str | None:
    """Return the reason why `model` (vLLM's `ModelConfig`) is no supported DeepSeek-V4 model, or None."""
    hf_config = getattr(model, "hf_config", None)
    names = getattr(hf_config, "architectures", None) or ()
    if names and not any("deepseekv4" in str(name).lower() for name in names):
        return f"the model is {', '.join(map(str, names))}, the kernels are DeepSeek-V4's"
    sizes = model_sizes(hf_config)
    if missing := sorted(name for name, size in sizes.items() if size is None):
        return f"the model's configuration has no {', '.join(missing)}"
    return None


def model_sizes(hf_config: Any) -> dict[str, int | None]:
    """Return the sizes of a model for the trials; None where there is no positive integer."""
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


def _reported(
    found: KernelChoice, standings: Iterable[Standing], report: Mapping[str, Any] | None = None
) -> KernelChoice:
    """Log `found`, write the report, and return `found`."""
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
    """Return a log line with JSON per operation for the agent (`dsv4_runtime.engine.logs`).

    A single line would exceed the length that the agent reads.
    """
    by: dict[Op, list[ProviderStatus]] = {op: [] for op in Op}
    for standing in filter(_tried, standings):
        slowness = standing.slowness and round(standing.slowness, 3)
        reason = standing.excluded and " ".join(standing.excluded.split())[:_REASON_LENGTH]
        by[standing.op].append(ProviderStatus(provider=standing.provider, slowness=slowness, excluded=reason))
    statuses = [KernelStatus(op=op, provider=found.provider(op), standings=tuple(by[op])) for op in Op]
    return [f"dsv4 kernels of rank {rank}: {one.to_json()}" for one in statuses]


def _tried(standing: Standing) -> bool:
    """Return whether the provider is installed."""
    from dsv4_runtime.vllm_plugin.kernels.evidence import ABSENT

    return standing.excluded is None or not standing.excluded.partition(": ")[2].startswith(ABSENT)


def _config() -> Any:
    """Return vLLM's configuration, or None outside of its context."""
    return vllm_api.get_current_vllm_config_or_none()


def _rank() -> int:
    config = _config()
    return 0 if config is None else int(config.parallel_config.rank)


def most_tokens(at_least: int) -> int:
    """Return the maximum number of tokens of a step, or `at_least` if greater."""
    return max(at_least, _TOKENS[0])


def most_rows(at_least: int) -> int:
    """Return the maximum number of tokens of a decoding request in a step with its drafts, or `at_least`."""
    return max(at_least, _ROWS[0])


def _note_tokens() -> None:
    config = _config()
    if config is not None:
        capture = config.compilation_config.max_cudagraph_capture_size or 0
        _TOKENS[0] = max(config.scheduler_config.max_num_batched_tokens, capture)
        drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        _ROWS[0] = 1 + drafts
