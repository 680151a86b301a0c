"""vLLM's own Triton kernels, compiled by processes while the engine's weights load.

vLLM compiles them one after another, or in threads of one process that take turns at Python's lock. Two sets are known
before: its runner's, with the sampler, from the configuration, and what the layers register for vLLM's JIT warm-up once
the model is made. A process that the worker forks before it uses CUDA forks those that compile, first the one set and
then the other; none of them has a GPU. vLLM's own warm-ups find in Triton's cache what they have compiled, and compile
what is missing. A thread beside the weights was slower: it takes from them what it saves.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from dsv4_kernels.arch import Arch, TargetGPU
from dsv4_kernels.precompile import launch_nothing, prepare_forks, share_of_kernels
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.forking import has_cuda, start_child, wait_for
from dsv4_runtime.vllm_plugin.kernels import precompile
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER, possible

if TYPE_CHECKING:
    from dsv4_runtime.vllm_plugin.kernels.runner_ahead import HostRunner

_FINISH_SECONDS = 60.0
_IMPORT_SECONDS = 10.0
# Besides, for the modules that the layers' kernels are in.


class Registered(NamedTuple):
    """One of vLLM's kernels, by the module and name of what compiles it, with its pickled keys."""

    module: str
    name: str
    keys: bytes


class _Compiled(NamedTuple):
    good: int
    processes: int
    error: str


@dataclass
class _AheadProcess:
    """The process that has others compile. It is told the layers' kernels once, and reports after each set."""

    pid: int
    pipe: Connection
    told: bool = False
    runner_is_done: bool = False

    running: ClassVar[_AheadProcess | None] = None

    def tell(self, registered: Sequence[Registered]) -> None:
        if not self.told:
            self.told = True
            # `finish` says if it has ended.
            with contextlib.suppress(OSError):
                self.pipe.send(registered)

    def report(self, what: str) -> bool:
        """Log the report on the next set, called `what`; return False if none came: the process is gone."""
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
        """Kill the process, and with it those that it has forked, if it has not ended."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        wait_for([self.pid], _FINISH_SECONDS)


def before_device(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the worker's `init_device`, begun with the processes that compile."""

    @functools.wraps(original)
    def init_device(worker: Any) -> None:
        try:
            begin(worker)
        except Exception as error:
            LOGGER.warning("dsv4 warm-up: nothing is compiled beside the weights: %s: %s", type(error).__name__, error)
        original(worker)

    return init_device


def after_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loader's `initialize_model`, after which the kernels that the layers have registered are compiled."""

    @functools.wraps(original)
    def initialize_model(*args: Any, **options: Any) -> Any:
        model = original(*args, **options)
        if (running := _AheadProcess.running) is not None:
            try:
                if registered := registered_kernels():
                    running.tell(registered)
            except Exception as error:
                LOGGER.warning(
                    "dsv4 warm-up: vLLM compiles what the layers registered itself: %s: %s", type(error).__name__, error
                )
        return model

    return initialize_model


def before_jit_warmup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `kernel_warmup`, begun when what the layers have registered is compiled."""

    @functools.wraps(original)
    def kernel_warmup(*args: Any, **options: Any) -> Any:
        finish()
        return original(*args, **options)

    return kernel_warmup


def begin(worker: Any) -> None:
    """Start the process, on the first rank of a machine alone: the others find what it has compiled."""
    config = worker.vllm_config
    if not config.kernel_config.enable_jit_warmup or not worker.use_v2_model_runner or worker.local_rank != 0:
        return
    if _AheadProcess.running is not None or has_cuda() or (arch := _arch()) is None:
        return
    # As many again compile the bundled kernels.
    count = max(1, precompile.compilers() // 2)
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        try:
            pid = start_child(functools.partial(serve, ours, theirs, config, arch, count))
        except OSError:
            ours.close()
            raise
    _AheadProcess.running = _AheadProcess(pid, ours)
    if any(map(possible, Op)):
        # Most cards of an architecture have as many.
        precompile.begin(TargetGPU(arch, arch.spec.multiprocessors))


def finish_runner() -> None:
    """Wait until the runner's kernels are compiled, and say how long."""
    running = _AheadProcess.running
    if running is None or running.runner_is_done:
        return
    # Nothing, if the model was made by a loader that is not known here.
    running.tell([])
    running.runner_is_done = True
    if not running.report("what the runner launches"):
        _AheadProcess.running = None


def finish() -> None:
    """Wait until all is compiled, say how long, and end the process."""
    finish_runner()
    running, _AheadProcess.running = _AheadProcess.running, None
    if running is not None and running.report("what the layers registered"):
        running.end()


def registered_kernels() -> list[Registered]:
    """Return the Triton kernels that the layers have registered by now, as vLLM's JIT warm-up will expand them.

    Those of other compilers are left out, those that are tuned (they need a GPU), and those whose keys need more than
    there is now: vLLM compiles them.
    """
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.model_executor.warmup.jit_warmup_triton_helper import VllmTritonJitKernel

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
    """Yield the keys of a kernel's registrations; one without arguments gets the configuration, if it takes that."""
    takes_config = "vllm_config" in inspect.signature(kernel.get_warmup_keys).parameters
    for args, options in registrations:
        more = {"vllm_config": vllm_config} if takes_config and not args and not options else {}
        yield from kernel.get_warmup_keys(*args, **options, **more)


def serve(ours: Connection, theirs: Connection, vllm_config: Any, arch: Arch, count: int) -> None:
    """Have `count` processes compile the runner's kernels for `arch`, then as many what the layers register.

    The process at the other end of the pipe, which had `ours`, sends the latter, and gets a report of each set.

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
    runner = _start(calls, count)
    # Once for all that compile its kernels, and while the worker imports it.
    with contextlib.suppress(Exception):
        import_model(vllm_config)
    registered: list[Registered] = theirs.recv()
    more = registered_calls(registered)
    theirs.send(_Compiled(wait_for(runner, _FINISH_SECONDS), len(runner), error))
    layers = _start(more, count)
    theirs.send(_Compiled(wait_for(layers, _FINISH_SECONDS), len(layers), ""))


def use_no_gpu(arch: Arch) -> None:
    """Have this process compile for `arch` from here on, launch nothing and see no GPU, whose memory it would take."""
    from vllm.platforms import current_platform

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Threads of the process that it was forked from are not here.
    torch.set_num_threads(1)
    launch_nothing(TargetGPU(arch, arch.spec.multiprocessors))
    # It would initialise CUDA.
    type(current_platform).num_compute_units = classmethod(lambda cls, device_id=0: arch.spec.multiprocessors)


def import_model(vllm_config: Any) -> None:
    """Import the model's class, and with it the modules of its kernels.

    Raises:
        Exception: whatever they raise; they are imported when the layers' kernels are told.
    """
    from vllm.model_executor.models import ModelRegistry

    for name in vllm_config.model_config.architectures:
        ModelRegistry.models[name].load_model_cls()


def runner_calls(vllm_config: Any, count: int) -> list[Callable[[], None]]:
    """Return the calls that compile what vLLM has no keys of, a share each.

    Raises:
        AttributeError, ImportError, TypeError: this vLLM has another runner.
    """
    from dsv4_runtime.vllm_plugin.kernels.runner_ahead import HostRunner

    runner = HostRunner(vllm_config)
    # Of no share: what fails is told before the processes are silent, and all of them have the kernels' hashes.
    _launch_share(runner, count, count)
    return [functools.partial(_launch_share, runner, share, count) for share in range(count)]


def choice_calls(vllm_config: Any) -> list[Callable[[], None]]:
    """Return the calls that compile the sampler's top-k and top-p, a kernel each.

    Raises:
        AttributeError, ImportError: this vLLM has other kernels.
    """
    from dsv4_runtime.vllm_plugin.kernels.sampling import top_k_top_p_keys

    keys = top_k_top_p_keys(vllm_config, vllm_config.model_config.get_vocab_size())
    return [functools.partial(kernel.compile, key) for kernel, of in keys.items() for key in of]


def _launch_share(runner: HostRunner, share: int, shares: int) -> None:
    with share_of_kernels(share, shares):
        runner.launch_all()


def registered_calls(registered: Sequence[Registered]) -> list[Callable[[], None]]:
    """Return the calls that compile what the layers have registered; without those that cannot be imported here."""
    calls: list[Callable[[], None]] = []
    for one in registered:
        with contextlib.suppress(Exception):
            kernel = getattr(importlib.import_module(one.module), one.name)
            calls += [functools.partial(kernel.compile, key) for key in pickle.loads(one.keys)]  # noqa: S301 -- its parent's
    return calls


def compile_all(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call, whatever becomes of the others.

    Raises:
        RuntimeError: some failed.
    """
    failed = 0
    for call in calls:
        try:
            call()
        except Exception:
            failed += 1
    if failed:
        raise RuntimeError(f"{failed} of {len(calls)} calls failed")


def _start(calls: Sequence[Callable[[], None]], most: int) -> list[int]:
    """Start at most `most` processes, which share `calls`; return their pids."""
    count = min(most, len(calls))
    return [start_child(functools.partial(compile_all, calls[share::count])) for share in range(count)]


def _arch() -> Arch | None:
    """Return the architecture of the worker's card, by NVML."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    with contextlib.suppress(ValueError):
        return None if found is None else Arch(f"sm_{found.major}{found.minor}")
    return None
