"""Compile some of the installed vLLM's kernels for an SM12x card, as if vLLM were a CUDA build: ahead, then by itself.

First the processes of `compile_ahead` compile, from a worker's `init_device` to vLLM's warm-up, then vLLM's own warm-up
in another process. Each prints a line: the logged messages, the numbers of kernels that the process compiled and found,
and the number of each name in the cache.
"""

import functools
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
import vllm.platforms as platforms
from triton.backends import backends
from vllm.platforms.interface import Platform, PlatformEnum


class Cuda(Platform):
    _enum = PlatformEnum.CUDA
    device_name = device_type = "cuda"
    dispatch_key = "CUDA"


for name, backend in backends.items():
    backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")
platforms._current_platform = Cuda()
platforms.vllm_version_matches_substr = lambda _: False

from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry  # noqa: E402
from vllm.v1.attention.backends.mla.compressor_utils import (  # noqa: E402
    _COMPRESSED_SLOT_MAPPING_KERNEL,
    CompressedSlotMappingKernel,
)
from vllm.v1.attention.backends.mla.sparse_swa import (  # noqa: E402
    _COMPUTE_PREFILL_METADATA_KERNEL,
    _COMPUTE_SWA_INDICES_AND_LENS_KERNEL,
)
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers  # noqa: E402
from vllm.v1.worker.gpu.sample import gumbel, penalties  # noqa: E402

from dsv4_kernels.arch import Arch  # noqa: E402
from dsv4_runtime.vllm_plugin.kernels import compile_ahead  # noqa: E402

text = SimpleNamespace(compress_ratios=[4, 128])
config = SimpleNamespace(
    kernel_config=SimpleNamespace(enable_jit_warmup=True),
    scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=64),
    parallel_config=SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
    ),
    cache_config=SimpleNamespace(block_size=256),
    num_speculative_tokens=0,
    reasoning_config=None,
    speculative_config=None,
    model_config=SimpleNamespace(
        get_vocab_size=lambda: 129280,
        hf_text_config=text,
        hf_config=text,
        dtype=torch.bfloat16,
        max_model_len=1024,
        logprobs_mode="raw_logprobs",
        use_fp64_gumbel=False,
    ),
)
registry = JitWarmupRegistry(config)
choices = compile_ahead.choice_calls


class Later(CompressedSlotMappingKernel):
    """A kernel whose keys are unknown before a KV cache exists."""

    def get_warmup_keys(self, vllm_config: object) -> list[object]:
        """Fail as without a KV cache."""
        raise AttributeError("kv_cache")


_LATER_KERNEL = Later()


def make_model(vllm_config: object) -> None:
    """Register the warm-ups of two layers."""
    for _ in range(2):
        _COMPUTE_PREFILL_METADATA_KERNEL.register_warmup()
        _COMPRESSED_SLOT_MAPPING_KERNEL.register_warmup()
        _COMPUTE_SWA_INDICES_AND_LENS_KERNEL.register_warmup(window_size=128, block_size=64, max_image_tokens=0)


def fewer_choices(vllm_config: object) -> list[functools.partial[None]]:
    """Return an eighth of the variants of top-k and top-p."""
    return choices(vllm_config)[5::8]


def penalise() -> None:
    """Let vLLM's own sampler apply penalties to its own batch, on a device without memory."""
    device, vocabulary = torch.device("meta"), config.model_config.get_vocab_size()
    penalties.UvaBackedTensor = buffer_on(device)
    state = penalties.PenaltiesState(
        config, SimpleNamespace(device=device, max_num_reqs=config.scheduler_config.max_num_seqs, vocab_size=vocabulary)
    )
    state.use_penalty[:] = True
    batch = InputBatch.make_dummy(2, 2, InputBuffers(2, 64, device))
    context = SimpleNamespace(
        expanded_idx_mapping=batch.expanded_idx_mapping,
        idx_mapping_np=batch.idx_mapping_np,
        input_ids=batch.input_ids[batch.logits_indices],
        expanded_local_pos=batch.expanded_local_pos,
    )
    state.apply(torch.empty((2, vocabulary), device=device), context)


def sample() -> None:
    """Run vLLM's sampling functions on a device without memory, as its sampler calls them for one random request."""
    logits = torch.empty((1, config.model_config.get_vocab_size()), dtype=torch.float32, device="meta")
    states = [torch.empty(2, dtype=dtype, device="meta") for dtype in (torch.float32, torch.int64)]
    batch = InputBatch.make_dummy(1, 1, InputBuffers(2, 64, torch.device("meta")))
    gumbel.apply_temperature(logits, batch.expanded_idx_mapping, states[0])
    gumbel.gumbel_sample(
        logits, batch.expanded_idx_mapping, *states, batch.positions, apply_temperature=False, is_drafting=False
    )


def buffer_on(device: torch.device) -> type:
    """Return vLLM's `UvaBackedTensor` without memory shared by host and GPU."""

    class Buffer:
        def __init__(self, size: int, dtype: torch.dtype) -> None:
            self.np = torch.zeros(size, dtype=dtype).numpy()
            self.gpu = torch.empty(size, dtype=dtype, device=device)

        def copy_to_uva(self) -> None:
            """Copy nothing."""

    return Buffer


def compiled_ahead() -> None:
    """Run the steps from a worker's `init_device` to vLLM's warm-up, with the processes that compile."""
    compile_ahead.has_cuda = lambda: False
    compile_ahead._arch = lambda: Arch.SM_121
    compile_ahead.plans.compilers = lambda: 4
    compile_ahead.choice_calls = fewer_choices
    worker = SimpleNamespace(vllm_config=config, local_rank=0, use_v2_model_runner=True)
    compile_ahead.before_device(lambda worker: None)(worker)
    with registry.activate():
        _LATER_KERNEL.register_warmup()
        compile_ahead.after_model(make_model)(config)
    compile_ahead.finish_runner()
    compile_ahead.before_jit_warmup(lambda worker: None)(worker)


def compiled_by_vllm() -> None:
    """Compile the same kernels with vLLM's own warm-ups, in this process, for an absent GPU."""
    compile_ahead.use_no_gpu(Arch.SM_121)
    # An engine with drafts has as many launches; nothing is compiled yet.
    compile_ahead.runner_calls(SimpleNamespace(**vars(config) | {"num_speculative_tokens": 3}), 1)
    compile_ahead.compile_all(fewer_choices(config))
    penalise()
    sample()
    with registry.activate():
        make_model(config)
    registry.warmup()


def report(compiled: Callable[[], None]) -> None:
    """Compile, and print the result."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    compile_ahead.LOGGER.addHandler(handler)
    compile_ahead.LOGGER.setLevel(logging.INFO)
    seen = Counter[bool]()
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: seen.update([cache_hit])
    compiled()
    cubins = Counter(path.stem for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin"))
    found = {"messages": messages, "compiled": seen[False], "found": seen[True], "cubins": cubins}
    print(json.dumps(found), flush=True)


if not (first := os.fork()):
    report(compiled_ahead)
    sys.exit()
if code := os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]):
    sys.exit(code)
report(compiled_by_vllm)
