"""The sampler of vLLM on CUDA: compiled for all common requests before vLLM serves, and usable without FlashInfer.

vLLM's own warm-up samples one batch in which every request asks for everything. What a request of another kind launches
is compiled when the first one comes: the log-probabilities of other numbers of tokens, top-k and top-p beside greedy or
seeded requests (FlashInfer takes neither), greedy requests with penalties. Read in vLLM 0.33.0.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsv4_runtime.vllm_plugin.kernels import compile_ahead
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER

MOST_LOGPROBS = 20
"""Most log-probabilities of a token in the OpenAI API, and in vLLM unless it is told otherwise."""
ROWS = (1, 2)
"""Requests of the batches that are sampled: what one launches differs from what several do."""
_WANTED = "VLLM_USE_FLASHINFER_SAMPLER"
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9, "seed": 1},
    {"temperature": 0.7, "top_k": 20, "seed": 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.0, "logit_bias": {0: 1.0}},
    {"temperature": 0.0, "allowed_token_ids": [0, 1]},
    {"temperature": 0.0, "_bad_words_token_ids": [[0], [1, 2]]},
)


def without_flashinfer(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return vLLM's `flashinfer_sampler_supported`, which says no where FlashInfer cannot be imported."""

    @functools.wraps(original)
    def flashinfer_sampler_supported() -> bool:
        try:
            return original()
        except ImportError as error:
            if os.environ.get(_WANTED) == "1":
                raise
            LOGGER.info("dsv4 sampling: without FlashInfer (%s)", error)
            return False

    return flashinfer_sampler_supported


def before_profile(original: Any) -> Any:
    """Return the worker's `determine_available_memory`, and before it the sampler's warm-up.

    The profile samples too, one kernel after the other; and the bundled kernels are compiled by other processes now.
    """

    @functools.wraps(original)
    def determine_available_memory(worker: Any) -> int:
        compile_ahead.finish_runner()
        begun = time.monotonic()
        try:
            done = warm_up(worker)
        except Exception as error:
            # Requests compile what is missing, as they do without dsv4.
            LOGGER.warning("dsv4 sampling: not compiled before it serves (%s: %s)", type(error).__name__, error)
        else:
            LOGGER.info("dsv4 sampling: %s kinds of requests in %.1f s", done, time.monotonic() - begun)
        available: int = original(worker)
        return available

    return determine_available_memory


def warm_up(worker: Any) -> int:
    """Compile what common requests launch in the sampler of `worker`; return how many kinds were sampled.

    None where vLLM is not to compile before it serves, and on a rank that does not sample.
    """
    runner = worker.model_runner
    if not worker.vllm_config.kernel_config.enable_jit_warmup or not worker.use_v2_model_runner:
        return 0
    if not runner.is_last_pp_rank or runner.sampler is None:
        return 0
    with torch.inference_mode():
        # First, and once: with several ranks it is a step of all of them.
        logits = _logits(runner, min(ROWS[-1], runner.max_num_reqs))
        compile_top_k_top_p(worker.vllm_config, logits.stride(0))
        kinds = list(requests())
        for rows in ROWS:
            _sample(runner, logits[:rows], kinds)
    return len(kinds)


def compile_top_k_top_p(vllm_config: Any, stride: int) -> None:
    """Compile vLLM's top-k and top-p for batches of every size, side by side, and for rows `stride` logits apart.

    How many parts a row is cut into depends on the number of requests, and which of the kernels run on whether requests
    that ask for top-p alone are in the batch. vLLM 0.33 compiles them for speculative decoding only, and each a second
    time for rows whose distance is no multiple of 16.
    """
    from vllm.model_executor.warmup import jit_warmup_triton_helper

    wanted = top_k_top_p_keys(vllm_config, stride)

    def compile_all() -> None:
        for kernel, keys in wanted.items():
            kernel.compile_many(keys)

    together = getattr(jit_warmup_triton_helper, "compile_triton_warmup", None)
    if together is None:  # vLLM 0.32
        compile_all()
    else:
        together(compile_all, sum(map(len, wanted.values())))


def top_k_top_p_keys(vllm_config: Any, stride: int) -> dict[Any, list[Any]]:
    """Return vLLM's kernels for top-k and top-p, with the keys that rows `stride` logits apart lead to."""
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.v1.sample.ops.topk_topp_sampler import register_top_k_top_p_warmups

    registry = JitWarmupRegistry(vllm_config)
    with registry.activate():
        register_top_k_top_p_warmups()

    def reached(key: Any) -> bool:
        distance: int = dict(key.inputs)["logits"].strides[0]
        return (distance % 16 == 0) == (stride % 16 == 0)

    return {
        kernel: [key for key in kernel.get_warmup_keys(vllm_config=vllm_config) if reached(key)]
        for kernel in registry._registrations
    }


def _logits(runner: Any, rows: int) -> torch.Tensor:
    """Return the model's logits of `rows` tokens, in its own type and layout."""
    size = (rows, runner.model_config.get_hidden_size())
    logits: torch.Tensor = runner.model.compute_logits(torch.zeros(size, dtype=runner.dtype, device=runner.device))
    return logits


def requests() -> Iterator[Any]:
    """Yield sampling parameters of every kind; the last ones are the simplest, and stay in the sampler's rows."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    yield SamplingParams.for_sampler_warmup()
    for kind in _KINDS:
        yield SamplingParams(**kind)
    answer = StructuredOutputsParams(json_object=True)
    yield SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=[0], structured_outputs=answer)
    for number in range(MOST_LOGPROBS + 1):
        yield SamplingParams(temperature=0.7, logprobs=number)
        yield SamplingParams(temperature=0.0, logprobs=number)
    yield SamplingParams(temperature=0.0)


def _sample(runner: Any, logits: torch.Tensor, kinds: list[Any]) -> None:
    """Sample from `logits` [requests, tokens] once for every kind, with all requests of that kind."""
    from vllm.v1.worker.gpu.input_batch import InputBatch

    rows = logits.shape[0]
    batch = InputBatch.make_dummy(rows, rows, runner.input_buffers)
    for kind in kinds:
        for row in range(rows):
            runner.sampler.add_request(row, kind)
        runner.sampler.apply_staged_writes()
        runner.sampler(logits, batch)
        # The GPU reads what the next kind is written over.
        torch.accelerator.synchronize()
