"""vLLM's top-k and top-p, compiled by processes while the engine's weights load.

They are most of what the sampler's warm-up compiles: twenty kernels, four of which take seconds each. The processes are
forked from the worker, which has imported vLLM, before it uses CUDA; they have no GPU. A thread beside the weights was
slower: it takes from them what it saves. What is not compiled by the time of the warm-up, the warm-up compiles.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from dsv4_kernels.arch import Arch, TargetGPU
from dsv4_kernels.precompile import launch_nothing
from dsv4_runtime.vllm_plugin.forking import has_cuda, start_child, wait_for
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER
from dsv4_runtime.vllm_plugin.kernels.precompile import compilers

_CHILDREN: list[int] = []
_FINISH_SECONDS = 60.0


def before_device(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the worker's `init_device`, begun with the processes that compile."""

    @functools.wraps(original)
    def init_device(worker: Any) -> None:
        try:
            begin(worker)
        except Exception as error:
            LOGGER.warning("dsv4 sampling: nothing is compiled beside the weights: %s: %s", type(error).__name__, error)
        original(worker)

    return init_device


def begin(worker: Any) -> None:
    """Start the processes, on the first rank of a machine alone: the others find what it has compiled."""
    config = worker.vllm_config
    if not config.kernel_config.enable_jit_warmup or not worker.use_v2_model_runner or worker.local_rank != 0:
        return
    if _CHILDREN or has_cuda() or (arch := _arch()) is None:
        return
    # As many again compile the bundled kernels.
    count = max(1, compilers() // 2)
    for share in range(count):
        _CHILDREN.append(start_child(functools.partial(compile_share, config, arch, share, count)))


def finish() -> None:
    """Wait for the processes, and say how long."""
    if not _CHILDREN:
        return
    begun, count = time.monotonic(), len(_CHILDREN)
    good = wait_for(_CHILDREN, _FINISH_SECONDS)
    _CHILDREN.clear()
    LOGGER.info(
        "dsv4 sampling: %s of %s processes compiled top-k and top-p beside the weights; waited %.1f s",
        good, count, time.monotonic() - begun,
    )  # fmt: skip


def compile_share(vllm_config: Any, arch: Arch, share: int, shares: int) -> None:
    """Compile every `shares`-th kernel from number `share` on for `arch`, in a process that uses no GPU.

    Raises:
        AttributeError, ImportError: this vLLM has other kernels.
    """
    from vllm.v1.sample.ops import topk_topp_triton

    from dsv4_runtime.vllm_plugin.kernels.sampling import top_k_top_p_keys

    launch_nothing(TargetGPU(arch, arch.spec.multiprocessors))
    if not hasattr(topk_topp_triton, "num_compute_units"):
        raise AttributeError("vLLM's top-k and top-p do not ask for the count of multiprocessors")
    # It would initialise CUDA in this process.
    topk_topp_triton.num_compute_units = lambda *_: arch.spec.multiprocessors
    keys = top_k_top_p_keys(vllm_config, vllm_config.model_config.get_vocab_size())
    compile_all([functools.partial(kernel.compile, key) for kernel, of in keys.items() for key in of][share::shares])


def compile_all(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call, whatever becomes of the others."""
    for call in calls:
        with contextlib.suppress(Exception):
            call()


def _arch() -> Arch | None:
    """Return the architecture of the worker's card, by NVML."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    with contextlib.suppress(ValueError):
        return None if found is None else Arch(f"sm_{found.major}{found.minor}")
    return None
