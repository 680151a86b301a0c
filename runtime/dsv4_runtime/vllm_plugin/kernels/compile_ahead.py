"""vLLM's own Triton kernels, compiled by processes while the engine's weights load; warm-up of the sampler.

vLLM compiles its kernels in sequence, or in threads that share Python's lock. Two sets are known before: the kernels of
its runner with the sampler, from the configuration, and the kernels registered by the layers for vLLM's JIT warm-up,
once the model is made. A process forked by the worker before its first use of CUDA forks the compiling processes, first
for the one set and then for the other; none of them has a GPU. vLLM's warm-ups find the compiled kernels in Triton's
cache and compile missing ones. A thread beside the weights was slower: it takes as much time from them as it saves.

The runner has no keys for some 35 small kernels of a step: inputs, block tables, structured output, the sampler and the
update after it. Its own objects launch them on the host, with the sizes of the configuration and host tensors; in a
process that launches nothing, only the arguments matter. Read in vLLM 0.32.0 and 0.33.0.

vLLM's own warm-up samples one batch in which every request uses all options. Kernels of other requests would be
compiled at their arrival: log-probabilities of other numbers of tokens, top-k and top-p beside greedy or seeded
requests (FlashInfer supports neither), greedy requests with penalties. Read in vLLM 0.33.0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from dsv4_kernels.arch import Arch, TargetGPU
from dsv4_kernels.precompile import launch_nothing, prepare_forks, share_of_kernels, use_shipped
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.forking import has_cuda, start_child, wait_for
from dsv4_runtime.vllm_plugin.kernels import plans, vllm_api
from dsv4_runtime.vllm_plugin.kernels.choice import LOGGER, possible

MOST_LOGPROBS = 20
"""Maximum number of log-probabilities of a token in the OpenAI API, and vLLM's default."""
ROWS = (1, 2)
"""Requests per sampled batch: one request launches other kernels than several."""
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
    """Return vLLM's `flashinfer_sampler_supported`, which returns False if FlashInfer cannot be imported."""

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
    """Return the worker's `determine_available_memory`, preceded by the sampler's warm-up.

    The profile samples too, compiling in sequence; other processes compile the bundled kernels meanwhile.
    """

    @functools.wraps(original)
    def determine_available_memory(worker: Any) -> int:
        finish_runner()
        begun = time.monotonic()
        try:
            done = warm_up_sampler(worker)
        except Exception as error:
            # Requests compile missing kernels, as without dsv4.
            LOGGER.warning("dsv4 sampling: not compiled before it serves (%s: %s)", type(error).__name__, error)
        else:
            LOGGER.info("dsv4 sampling: %s kinds of requests in %.1f s", done, time.monotonic() - begun)
        available: int = original(worker)
        return available

    return determine_available_memory


def warm_up_sampler(worker: Any) -> int:
    """Compile the sampler kernels of common requests in `worker`; return the number of sampled kinds.

    0 if vLLM's JIT warm-up is disabled, and on a rank without a sampler.
    """
    runner = worker.model_runner
    if not worker.vllm_config.kernel_config.enable_jit_warmup or not worker.use_v2_model_runner:
        return 0
    if not runner.is_last_pp_rank or runner.sampler is None:
        return 0
    with torch.inference_mode():
        # First, and once: with several ranks all of them take part.
        logits = _logits(runner, min(ROWS[-1], runner.max_num_reqs))
        compile_top_k_top_p(worker.vllm_config, logits.stride(0))
        kinds = list(sampling_requests())
        for rows in ROWS:
            _sample(runner, logits[:rows], kinds)
    return len(kinds)


def compile_top_k_top_p(vllm_config: Any, stride: int) -> None:
    """Compile vLLM's top-k and top-p concurrently for batches of all sizes, for rows with a stride of `stride` logits.

    The number of requests determines the parts of a row; requests with top-p alone determine the kernels of a batch.
    vLLM 0.33 compiles them for speculative decoding only, and again for strides that are no multiple of 16.
    """
    wanted = top_k_top_p_keys(vllm_config, stride)

    def compile_all() -> None:
        for kernel, keys in wanted.items():
            kernel.compile_many(keys)

    vllm_api.adapter().compile_together(compile_all, sum(map(len, wanted.values())))


def top_k_top_p_keys(vllm_config: Any, stride: int) -> dict[Any, list[Any]]:
    """Return vLLM's kernels for top-k and top-p with their keys for rows with a stride of `stride` logits."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import JitWarmupRegistry, register_top_k_top_p_warmups

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
    """Return logits of `rows` tokens from the model, in its type and layout."""
    size = (rows, runner.model_config.get_hidden_size())
    logits: torch.Tensor = runner.model.compute_logits(torch.zeros(size, dtype=runner.dtype, device=runner.device))
    return logits


def sampling_requests() -> Iterator[Any]:
    """Yield sampling parameters of all kinds; the last ones are the simplest and stay in the sampler's rows."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import SamplingParams, StructuredOutputsParams

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
    """Sample from `logits` [requests, tokens] once per kind, with all requests of that kind."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import InputBatch

    rows = logits.shape[0]
    batch = InputBatch.make_dummy(rows, rows, runner.input_buffers)
    for kind in kinds:
        for row in range(rows):
            runner.sampler.add_request(row, kind)
        runner.sampler.apply_staged_writes()
        runner.sampler(logits, batch)
        # The next kind overwrites buffers that the GPU reads.
        torch.accelerator.synchronize()


_HOST = torch.device("cpu")
_LARGE = 1 << 20
# Elements from which a tensor is not zeroed, so that it gets no pages; its content is never read.


class HostRunner:
    """The parts of vLLM's runner that launch kernels."""

    def __init__(self, vllm_config: Any) -> None:
        """Args:
        vllm_config: vLLM's configuration of the engine.

        Raises:
            AttributeError, ImportError, TypeError: this vLLM has another runner.
        """
        with _on_host():
            self._make(vllm_config)

    def launch_all(self) -> None:
        """Launch the kernels of steps with one and two requests, and of the sampler for all kinds of requests.

        Raises:
            AttributeError, ImportError, TypeError: this vLLM has another runner; some kernels may have been launched.
        """
        with _on_host(), torch.inference_mode():
            for rows in ROWS[: self.most]:
                self._step(rows)

    def _make(self, vllm_config: Any) -> None:
        from dsv4_runtime.vllm_plugin.kernels.vllm_api import (
            BlockTables,
            InputBuffers,
            RequestState,
            Sampler,
            StructuredOutputsWorker,
        )

        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        self.most = scheduler.max_num_seqs
        self.vocabulary = model.get_vocab_size()
        self.dtype = model.dtype
        self.drafts = vllm_config.num_speculative_tokens
        sizes = {
            "max_num_reqs": self.most, "max_model_len": model.max_model_len, "device": _HOST,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens, "vocab_size": self.vocabulary,
        }  # fmt: skip
        ahead = max(1, getattr(vllm_config, "num_prefill_lookahead_tokens", 1))
        self.states = _called(RequestState, **sizes, num_speculative_steps=self.drafts, num_prefill_lookahead=ahead)
        self.buffers = InputBuffers(self.most, scheduler.max_num_batched_tokens, _HOST)
        # The kernels read page sizes and widths; DeepSeek-V4 has several groups, one of them with a window.
        self.tables = _called(
            BlockTables, **sizes, block_sizes=[64, 256], max_num_blocks_per_group=[16, 16],
            sliding_window_reach=[128, 0],
        )  # fmt: skip
        self.sampler = _called(
            Sampler, **sizes, vllm_config=vllm_config, req_states=self.states, num_speculative_tokens=self.drafts + 1,
            logprobs_mode=model.logprobs_mode, use_fp64_gumbel=model.use_fp64_gumbel,
        )  # fmt: skip
        self.constraints = _called(
            StructuredOutputsWorker, **sizes, max_num_logits=self.most * (self.drafts + 1),
            mask_stride=self.drafts + 1, num_bonus_tokens=1,
        )  # fmt: skip

    def _step(self, rows: int) -> None:
        from dsv4_runtime.vllm_plugin.kernels.vllm_api import InputBatch

        for row in range(rows):
            self.states.add_request(str(row), 2, [0, 0], 0, 1)
            self.tables.append_block_ids(row, ([1], [1]), overwrite=True)
        self.states.apply_staged_writes()
        self.tables.apply_staged_writes()
        batch = InputBatch.make_dummy(rows, rows, self.buffers)
        self._prepare(batch)
        logits = torch.empty((rows, self.vocabulary), dtype=self.dtype)
        masks = vllm_api.adapter().grammar_masks(rows, self.drafts)
        mask = np.empty((masks, -(-self.vocabulary // 32)), dtype=np.int32)
        self.constraints.apply_grammar_bitmask(logits, batch, batch.req_ids, mask)
        for kind in sampling_requests():
            for row in range(rows):
                self.sampler.add_request(row, kind)
            self.sampler.apply_staged_writes()
            sampled = self.sampler(logits, batch)
        self._update(batch, sampled)
        for row in range(rows):
            self.states.remove_request(str(row))

    def _prepare(self, batch: Any) -> None:
        from dsv4_runtime.vllm_plugin.kernels.vllm_api import (
            compute_token_to_req_indices,
            get_prompt_logprobs_token_ids,
            input_batch,
        )

        states, buffers, rows = self.states, self.buffers, batch.num_reqs
        computed, tokens = states.num_computed_tokens.gpu, states.all_token_ids.gpu
        where = (batch.idx_mapping, batch.query_start_loc)
        input_batch.prepare_prefill_inputs(
            buffers.input_ids, states.next_prefill_tokens, *where, tokens, states.prefill_len.gpu, computed
        )
        input_batch.prepare_pos_seq_lens(*where, computed, buffers.positions, buffers.seq_lens)
        input_batch.combine_sampled_and_draft_tokens(
            buffers.input_ids, batch.idx_mapping, states.last_sampled_tokens, batch.query_start_loc, batch.seq_lens,
            states.prefill_len.gpu, states.draft_tokens, batch.cu_num_logits, rows,
        )  # fmt: skip
        _called(
            self.tables.gather_block_tables, idx_mapping=batch.idx_mapping, num_reqs_padded=rows,
            num_computed_tokens=computed,
        )  # fmt: skip
        self.tables.compute_slot_mappings(*where, batch.positions, batch.num_tokens)
        compute_token_to_req_indices(batch.query_start_loc, torch.empty(rows, dtype=torch.int32), rows, rows)
        get_prompt_logprobs_token_ids(batch.num_tokens, batch.query_start_loc, batch.idx_mapping, computed, tokens)

    def _update(self, batch: Any, sampled: Any) -> None:
        from dsv4_runtime.vllm_plugin.kernels.vllm_api import post_update

        states = self.states
        _called(
            post_update, idx_mapping=batch.idx_mapping, num_computed_tokens=states.num_computed_tokens.gpu,
            last_sampled_tokens=states.last_sampled_tokens,
            output_bin_counts=self.sampler.penalties_state.output_bin_counts, sampled_tokens=sampled.sampled_token_ids,
            num_sampled=sampled.num_sampled, num_rejected=sampled.num_rejected, query_start_loc=batch.query_start_loc,
            all_token_ids=states.all_token_ids.gpu, total_len=states.total_len.gpu,
            draft_tokens_out=states.draft_tokens,
        )  # fmt: skip


class _NoStream:
    """A CUDA stream on the host."""

    def wait_stream(self, stream: object) -> None:
        """Return immediately."""


def _called(function: Callable[..., Any], **values: Any) -> Any:
    """Call `function` with those of `values` that are among its parameters."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in known})


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Make vLLM's runner allocate its tensors on the host, unpinned, large ones without pages."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import buffer_utils, sampler

    def not_pinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *values, pin_memory=False, **options: make(*values, **options)

    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        made = torch.empty(*size, **options)
        return made if made.numel() > _LARGE else made.zero_()

    def unchanged(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def as_they_are(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        # Their keys compile top-k and top-p.
        return logits

    replaced: list[tuple[Any, str, Any]] = [
        (torch, "empty", not_pinned(torch.empty)),
        (torch, "tensor", not_pinned(torch.tensor)),
        (torch, "zeros", zeros),
        (torch.cuda, "Stream", _NoStream),
        (torch.cuda, "current_stream", _NoStream),
        (torch.cuda, "stream", contextlib.nullcontext),
        (buffer_utils, "is_uva_available", lambda: True),
        (buffer_utils, "get_accelerator_view_from_cpu_tensor", unchanged),
        (sampler, "flashinfer_sampler_supported", lambda: False),
        (sampler, "apply_top_k_top_p", as_they_are),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


_FINISH_SECONDS = 60.0
_IMPORT_SECONDS = 10.0
# Additional time for the import of the modules with the layers' kernels.


class Registered(NamedTuple):
    """A kernel of vLLM: module and name of its compiling object, and the pickled keys."""

    module: str
    name: str
    keys: bytes


class _Compiled(NamedTuple):
    good: int
    processes: int
    error: str


@dataclass
class _AheadProcess:
    """The parent of the compiling processes. It gets the layers' kernels once, and reports after each set."""

    pid: int
    pipe: Connection
    has_kernels: bool = False
    runner_is_done: bool = False

    running: ClassVar[_AheadProcess | None] = None

    def send(self, registered: Sequence[Registered]) -> None:
        if not self.has_kernels:
            self.has_kernels = True
            # `finish` logs the end of the process.
            with contextlib.suppress(OSError):
                self.pipe.send(registered)

    def report(self, what: str) -> bool:
        """Log the report on the next set, named `what`; return False without a report: the process has ended."""
        begun = time.monotonic()
        try:
            if not self.pipe.poll(_FINISH_SECONDS + _IMPORT_SECONDS):
                raise TimeoutError(f"not done after {time.monotonic() - begun:.0f} s")
            found: _Compiled = self.pipe.recv()
        except (EOFError, OSError) as error:
            LOGGER.warning("dsv4 warm-up: vLLM compiles %s itself: %r", what, error)
            self.end()
            return False
        if found.error:
            LOGGER.warning("dsv4 warm-up: vLLM compiles some of %s itself: %s", what, found.error)
        if found.processes:
            LOGGER.info(
                "dsv4 warm-up: %s of %s processes compiled %s beside the weights; waited %.1f s",
                found.good, found.processes, what, time.monotonic() - begun,
            )  # fmt: skip
        return True

    def end(self) -> None:
        """Kill the process with its children if it has not ended."""
        self.pipe.close()
        wait_for([self.pid], 0.0)


def before_device(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the worker's `init_device`, preceded by the shipped kernels and the start of the compiling processes."""

    @functools.wraps(original)
    def init_device(worker: Any) -> None:
        try:
            if (arch := _arch()) is not None:
                use_shipped(arch)
            begin(worker)
        except Exception as error:
            LOGGER.warning("dsv4 warm-up: nothing is compiled beside the weights: %s: %s", type(error).__name__, error)
        original(worker)

    return init_device


def after_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loader's `initialize_model`, followed by the compilation of the kernels registered by the layers."""

    @functools.wraps(original)
    def initialize_model(*args: Any, **options: Any) -> Any:
        model = original(*args, **options)
        if (running := _AheadProcess.running) is not None:
            try:
                if registered := registered_kernels():
                    running.send(registered)
            except Exception as error:
                LOGGER.warning(
                    "dsv4 warm-up: vLLM compiles the layers' registered kernels itself: %s: %s",
                    type(error).__name__,
                    error,
                )
        return model

    return initialize_model


def before_jit_warmup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `kernel_warmup`, started after the compilation of the kernels registered by the layers."""

    @functools.wraps(original)
    def kernel_warmup(*args: Any, **options: Any) -> Any:
        finish()
        return original(*args, **options)

    return kernel_warmup


def begin(worker: Any) -> None:
    """Start the process on the first rank of a machine only; the others use the compiled kernels."""
    config = worker.vllm_config
    if not config.kernel_config.enable_jit_warmup or not worker.use_v2_model_runner or worker.local_rank != 0:
        return
    if _AheadProcess.running is not None or has_cuda() or (arch := _arch()) is None:
        return
    # The other half compiles the bundled kernels.
    count = max(1, plans.compilers() // 2)
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        try:
            pid = start_child(functools.partial(serve, ours, theirs, config, arch, count))
        except OSError:
            ours.close()
            raise
    _AheadProcess.running = _AheadProcess(pid, ours)
    if any(map(possible, Op)):
        # Most cards of an architecture have this number.
        plans.begin(TargetGPU(arch, arch.spec.multiprocessors))


def finish_runner() -> None:
    """Wait until the runner's kernels are compiled, and log the time."""
    running = _AheadProcess.running
    if running is None or running.runner_is_done:
        return
    # No kernels if another loader made the model.
    running.send([])
    running.runner_is_done = True
    if not running.report("the runner's launches"):
        _AheadProcess.running = None


def finish() -> None:
    """Wait until all kernels are compiled, log the time, and end the process."""
    finish_runner()
    running, _AheadProcess.running = _AheadProcess.running, None
    if running is not None and running.report("the layers' registered kernels"):
        running.end()


def registered_kernels() -> list[Registered]:
    """Return the Triton kernels registered by the layers so far, expanded as by vLLM's JIT warm-up.

    vLLM itself compiles the rest: kernels of other compilers, autotuned ones (they need a GPU), and kernels whose keys
    are not available yet.
    """
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import JitWarmupRegistry, VllmTritonJitKernel

    registry = JitWarmupRegistry._active.get()
    found = []
    for kernel, registrations in {} if registry is None else registry._registrations.items():
        if not isinstance(kernel, VllmTritonJitKernel) or kernel._run_autotune:
            continue
        with contextlib.suppress(Exception):
            module = kernel.__module__
            name = next(name for name, one in vars(sys.modules[module]).items() if one is kernel)
            keys = dict.fromkeys(_keys(kernel, registrations, registry.vllm_config))
            found.append(Registered(module, name, pickle.dumps(list(keys))))
    return found


def _keys(kernel: Any, registrations: Sequence[Any], vllm_config: Any) -> Iterator[Any]:
    """Yield the keys of a kernel's registrations; one without arguments gets the configuration if it has the
    parameter."""
    takes_config = "vllm_config" in inspect.signature(kernel.get_warmup_keys).parameters
    for args, options in registrations:
        more = {"vllm_config": vllm_config} if takes_config and not args and not options else {}
        yield from kernel.get_warmup_keys(*args, **options, **more)


def serve(ours: Connection, theirs: Connection, vllm_config: Any, arch: Arch, count: int) -> None:
    """Compile the runner's kernels for `arch` in `count` processes, then the kernels registered by the layers.

    The process at the other end of the pipe, the owner of `ours`, sends the registered kernels and gets a report per
    set.

    Raises:
        EOFError: that process has ended.
    """
    ours.close()
    use_no_gpu(arch)
    prepare_forks()
    error = ""
    calls: list[Callable[[], None]] = []
    for found in (functools.partial(runner_calls, vllm_config, count), functools.partial(choice_calls, vllm_config)):
        try:
            calls += found()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
    runner = start_compilers(calls, count)
    # Once for all compiling processes, while the worker imports it.
    with contextlib.suppress(Exception):
        import_model(vllm_config)
    registered: list[Registered] = theirs.recv()
    more = registered_calls(registered)
    theirs.send(_Compiled(wait_for(runner, _FINISH_SECONDS), len(runner), error))
    layers = start_compilers(more, count)
    theirs.send(_Compiled(wait_for(layers, _FINISH_SECONDS), len(layers), ""))


def use_no_gpu(arch: Arch) -> None:
    """Configure this process to compile for `arch`, launch nothing and see no GPU, whose memory it would allocate."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import current_platform

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A fork has no threads of its parent.
    torch.set_num_threads(1)
    launch_nothing(TargetGPU(arch, arch.spec.multiprocessors))
    # The original initializes CUDA.
    type(current_platform).num_compute_units = classmethod(lambda cls, device_id=0: arch.spec.multiprocessors)


def import_model(vllm_config: Any) -> None:
    """Import the model's class, and with it the modules of its kernels.

    Raises:
        Exception: raised by the modules; they are imported again with the layers' kernels.
    """
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import ModelRegistry

    for name in vllm_config.model_config.architectures:
        ModelRegistry.models[name].load_model_cls()


def runner_calls(vllm_config: Any, count: int) -> list[Callable[[], None]]:
    """Return the calls that compile kernels without keys, a share each.

    Raises:
        AttributeError, ImportError, TypeError: this vLLM has another runner.
    """
    runner = HostRunner(vllm_config)
    # An empty share: reports errors before output is discarded, and computes the kernels' hashes for all processes.
    _launch_share(runner, count, count)
    return [functools.partial(_launch_share, runner, share, count) for share in range(count)]


def choice_calls(vllm_config: Any) -> list[Callable[[], None]]:
    """Return the calls that compile the sampler's top-k and top-p, one per kernel.

    Raises:
        AttributeError, ImportError: this vLLM has other kernels.
    """
    keys = top_k_top_p_keys(vllm_config, vllm_config.model_config.get_vocab_size())
    return [functools.partial(kernel.compile, key) for kernel, of in keys.items() for key in of]


def _launch_share(runner: HostRunner, share: int, shares: int) -> None:
    with share_of_kernels(share, shares):
        runner.launch_all()


def registered_calls(registered: Sequence[Registered]) -> list[Callable[[], None]]:
    """Return the calls that compile the registered kernels, except those that cannot be imported."""
    calls: list[Callable[[], None]] = []
    for one in registered:
        with contextlib.suppress(Exception):
            kernel = getattr(importlib.import_module(one.module), one.name)
            calls += [functools.partial(kernel.compile, key) for key in pickle.loads(one.keys)]  # noqa: S301 -- its parent's
    return calls


def compile_all(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls, also after failures.

    Raises:
        RuntimeError: some calls failed.
    """
    failed = 0
    for call in calls:
        try:
            call()
        except Exception:
            failed += 1
    if failed:
        raise RuntimeError(f"{failed} of {len(calls)} calls failed")


def start_compilers(calls: Sequence[Callable[[], None]], most: int) -> list[int]:
    """Start at most `most` processes that share `calls`; return their pids."""
    count = min(most, len(calls))
    return [start_child(functools.partial(compile_all, calls[share::count])) for share in range(count)]


def _arch() -> Arch | None:
    """Return the architecture of the worker's card from NVML."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import current_platform

    found = current_platform.get_device_capability()
    with contextlib.suppress(ValueError):
        return None if found is None else Arch(f"sm_{found.major}{found.minor}")
    return None
