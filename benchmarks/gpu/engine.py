"""Start vLLM on one checkpoint in this process and measure it: start, tokens, steps, compilations after ready.

    python -m benchmarks.gpu.engine MODEL --kernels off --out stock.json
    python -m benchmarks.gpu.engine MODEL --kernels auto --out bundled.json
    python -m benchmarks.gpu.compare stock.json bundled.json

`--kernels` has the values of `DSV4_KERNELS`. `--without-compilers` hides DeepGEMM, TileLang, CuTe, FlashInfer and nvcc
from the engine; `--mixed 120` serves requests of all kinds for 120 s after the measurements.

The first start of a machine, with kernels that were compiled elsewhere (`--shipped`) and an empty home directory:

    python -m benchmarks.gpu.engine MODEL --kernels $ALL --home /tmp/first --pack /tmp/shipped --out first.json
    python -m benchmarks.gpu.engine MODEL --kernels $ALL --home /tmp/other --shipped /tmp/shipped \
        --without-compilers --without-c --batches 1 8 --answers --out shipped.json

`compiled_at_start` has the kernels and launchers that Triton compiled before the engine was ready, `compiled_in_all`
those of the whole run: files of the cache in that home directory which are not the shipped ones.

A step is timed on the GPU, from the start of a replayed decode step to its end, and the times of its kernels are summed
with torch's profiler; both figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import fcntl
import io
import json
import logging
import os
import pstats
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu import absent, mixed

BEGUN = time.time()
BATCHES = (1, 8, 32, 64)
NAME = 120
"""Stored characters of a kernel's name."""
_ONCE_A_LAYER = ("fusedDeepseekV4QNormRopeKV", "front_insert_kernel")
"""Parts of the names of the kernel before a layer's attention, vLLM's and the bundled one; one of them runs."""
KV_BYTES = 4 << 30
"""Fixed instead of measured: engines that start concurrently would count each other's memory as their own."""


def prompts(count: int, longest: int) -> list[list[int]]:
    """Return `count` prompts of 5 to `longest` tokens (ids below 500, none special); lengths grow quadratically."""
    lengths = [5 + round((longest - 5) * (i / max(1, count - 1)) ** 2) for i in range(count)]
    return [[5 + (i * 7919 + j * 104729 + (j * j) % 251) % 490 for j in range(n)] for i, n in enumerate(lengths)]


class Compilations(logging.Handler):
    """Keeps the reports of vLLM's JIT monitor after the engine is ready, one for each compilation."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.seen.append(record.getMessage().splitlines()[0][:400])


class Steps:
    """CUDA events around every step of the worker."""

    def __init__(self, llm: Any) -> None:
        import torch

        self.events: list[tuple[Any, Any]] = []
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        worker = getattr(executor.driver_worker, "worker", executor.driver_worker)
        self.worker, original = worker, worker.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = original(*args, **kwargs)
            end.record()
            self.events.append((begin, end))
            return result

        worker.execute_model = execute_model

    def take(self) -> list[float]:
        """Return the milliseconds of the steps since the last call."""
        import torch

        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) for begin, end in self.events]
        self.events.clear()
        return times


def drafting(text: str | None) -> dict[str, Any] | None:
    """Return vLLM's speculative configuration for METHOD:TOKENS or METHOD:TOKENS:SAMPLING; None for None.

    The default of SAMPLING is greedy; `dsv4 up` uses `probabilistic` for DSpark.
    """
    if text is None:
        return None
    method, tokens, sampling = (*text.split(":"), "greedy")[:3]
    return {"method": method, "num_speculative_tokens": int(tokens), "draft_sample_method": sampling}


def graph_sizes(prefills: list[int], speculative: dict[str, Any] | None) -> list[int]:
    """Return the tokens of the graphs: for up to 64 requests with all drafts of a step, and for `prefills`."""
    verified = 1 + (speculative["num_speculative_tokens"] if speculative else 0)
    return sorted({*(requests * verified for requests in (1, 2, 4, 8, 16, 32, 64)), *prefills})


def start(options: argparse.Namespace, speculative: dict[str, Any] | None) -> Any:
    """Return a running `vllm.LLM`."""
    from vllm import LLM

    return LLM(
        model=options.model,
        max_model_len=options.max_len,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enforce_eager=options.eager,
        gpu_memory_utilization=options.memory,
        kv_cache_memory_bytes=KV_BYTES,
        block_size=256,
        kv_cache_dtype="fp8",
        enable_prefix_caching=False,
        cudagraph_capture_sizes=None if options.eager else graph_sizes(options.prefill_graphs, speculative),
        kernel_config={"enable_jit_warmup": not options.no_jit_warmup},
        jit_monitor_verbose=True,
        speculative_config=speculative,
        disable_log_stats=False,
        seed=0,
    )


def generate(llm: Any, tokens: list[list[int]], count: int, logprobs: int | None = None) -> Any:
    """Return vLLM's greedy outputs of `count` tokens each."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=logprobs)
    return llm.generate([{"prompt_token_ids": ids} for ids in tokens], parameters, use_tqdm=False)


def answers(llm: Any, questions: list[list[int]], alone: bool) -> Iterator[dict[str, Any]]:
    """Yield the greedy tokens of every prompt, and the two best log-probabilities at each token."""
    for group in [[q] for q in questions] if alone else [questions[i : i + 8] for i in range(0, len(questions), 8)]:
        for output in generate(llm, group, 16, logprobs=2):
            best = [sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in output.outputs[0].logprobs]
            yield {"tokens": list(output.outputs[0].token_ids), "best": best}


def decode_steps(llm: Any, steps: Steps, batch: int, context: int) -> dict[str, float]:
    """Return milliseconds of a decode step of `batch` requests: on the GPU, its kernels alone, and by the clock."""
    questions = prompts(batch, context)
    questions = [(q * (context // len(q) + 1))[:context] for q in questions]
    generate(llm, questions, 4)
    steps.take()
    short = time.perf_counter()
    generate(llm, questions, 2)
    short = time.perf_counter() - short
    steps.take()
    whole = time.perf_counter()
    generate(llm, questions, 66)
    whole = time.perf_counter() - whole
    on_gpu = statistics.median(steps.take()[-48:])
    return {"gpu_ms": on_gpu, "clock_ms": (whole - short) / 64 * 1e3, **kernels_of(llm, questions, steps)}


def kernels_of(llm: Any, questions: list[list[int]], steps: Steps) -> dict[str, Any]:
    """Return the summed milliseconds of the kernels of one decode step, their number, and the longest ones."""
    long = profiled_events(llm, questions, 18)
    spent = totals([(1, long), (-1, profiled_events(llm, questions, 2))], 16)
    steps.take()
    layers = llm.llm_engine.model_config.hf_config.num_hidden_layers
    found = layers_of(long, layers)
    return {
        **spent,
        "layer_launches": statistics.mean(map(len, found)) if found else None,
        "layers": found[1 - layers :],
    }


def profiled_events(llm: Any, questions: list[list[int]], count: int) -> Any:
    """Return the GPU events of torch's profiler during the generation of `count` tokens."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        generate(llm, questions, count)
    return profiled.events()


def totals(runs: list[tuple[int, Any]], steps: int) -> dict[str, Any]:
    """Return kernels' milliseconds and launches of one of `steps`, summed over `runs` of (sign, events).

    `busy_ms` counts time with several concurrent kernels once: kernels of other streams, and kernels that are launched
    before the end of their predecessor.
    """
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    busy = 0.0
    for sign, events in runs:
        spans = []
        for event in events:
            if str(event.device_type).endswith("CUDA"):
                times[event.name] += sign * event.device_time_total
                counts[event.name] += sign
                spans.append((event.time_range.start, event.time_range.end))
        busy += sign * covered(spans)
    top = [(name[:NAME], round(us / steps, 1), round(counts[name] / steps, 1)) for name, us in times.most_common(60)]
    return {
        "busy_ms": busy / steps / 1e3,
        "kernels_ms": sum(times.values()) / steps / 1e3,
        "launches": sum(counts.values()) / steps,
        "top_us": top,
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of `spans` of (start, end)."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def layers_of(events: Any, layers: int) -> list[list[str]]:
    """Return the names of the launches between the beginnings of successive layers, for at most ten steps.

    The last layer of a step is omitted, because no layer follows it. Empty if no kernel marks a layer.
    """
    order = sorted((e for e in events if str(e.device_type).endswith("CUDA")), key=lambda e: e.time_range.start)
    names = [event.name[:NAME] for event in order]
    at = [place for place, name in enumerate(names) if any(mark in name for mark in _ONCE_A_LAYER)]
    found = [names[before:after] for number, (before, after) in enumerate(pairwise(at), 1) if number % layers]
    return found[-10 * (layers - 1) :]


def acceptance(llm: Any) -> dict[str, float]:
    """Return vLLM's counters of drafts: number of drafts, their tokens, and accepted tokens."""
    start = "vllm:spec_decode_num_"
    return {
        found.name.removeprefix(start): found.value
        for found in llm.get_metrics()
        if found.name.startswith(start) and hasattr(found, "value")
    }


def prefill(llm: Any, steps: Steps, tokens: int) -> dict[str, Any]:
    """Return median milliseconds of a prefill of one prompt: by the clock, on the GPU, and its kernels alone."""
    question = (prompts(1, tokens)[0] * tokens)[:tokens]
    clock, gpu = [], []
    # In the first runs of a size, torch allocates memory from the driver.
    for timed in (False,) * 3 + (True,) * 9:
        begun = time.perf_counter()
        generate(llm, [question], 1)
        passed = (time.perf_counter() - begun) * 1e3
        on_gpu = sum(steps.take())
        if timed:
            clock.append(passed)
            gpu.append(on_gpu)
    spent = totals([(1, profiled_events(llm, [question], 1))], 1)
    steps.take()
    return {"clock_ms": statistics.median(clock), "gpu_ms": statistics.median(gpu), **spent}


def host_profile(llm: Any, tokens: int) -> str:
    """Return the functions with the most time of this process in a prefill of one prompt.

    They are followed by the calls of CUDA's runtime in another prefill, and the callers of those that wait for the GPU.
    """
    from torch.profiler import ProfilerActivity, profile

    question = (prompts(1, tokens)[0] * tokens)[:tokens]
    profiled = cProfile.Profile()
    profiled.runcall(generate, llm, [question], 1)
    text = io.StringIO()
    pstats.Stats(profiled, stream=text).sort_stats("tottime").print_stats(60)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=True) as traced:
        generate(llm, [question], 1)
    calls = [e for e in traced.events() if e.name.startswith("cu") and str(e.device_type).endswith("CPU")]
    times, counts = Counter[str](), Counter(e.name for e in calls)
    for event in calls:
        times[event.name] += event.time_range.elapsed_us()
    for name, us in times.most_common(20):
        text.write(f"{name}: {counts[name]} calls, {us / 1e3:.2f} ms\n")
    for event in sorted(calls, key=lambda e: -e.time_range.elapsed_us())[:12]:
        parents, parent = [], event.cpu_parent
        while parent is not None and len(parents) < 6:
            parents.append(parent.name)
            parent = parent.cpu_parent
        text.write(f"{event.time_range.elapsed_us() / 1e3:.2f} ms {event.name} of {' < '.join(parents)}\n")
    return text.getvalue()


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--max-len", type=int, default=9216)
    parser.add_argument("--memory", type=float, default=0.5)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--answers", nargs="*", choices=("batched", "alone"), default=["batched", "alone"])
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--no-jit-warmup", action="store_true", help="let vLLM compile its kernels at first use")
    parser.add_argument("--lock", type=Path, help="measure while holding this file's lock, if several engines run")
    parser.add_argument("--prefills", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--prefill-graphs", type=int, nargs="*", default=[], help="tokens of prefills with a graph")
    parser.add_argument("--host-profile", type=Path, metavar="FILE", help="file of a host profile of the first prefill")
    parser.add_argument("--without-compilers", action="store_true", help="hide compiler packages and nvcc")
    parser.add_argument(
        "--mixed", type=float, default=0.0, metavar="SECONDS", help="serve a mixed load after the measurements"
    )
    parser.add_argument(
        "--speculative",
        type=drafting,
        metavar="METHOD:TOKENS[:SAMPLING]",
        help="draft with the checkpoint's layers (mtp:3, dspark:5), greedily or probabilistic",
    )
    parser.add_argument("--without-c", action="store_true", help="hide C compilers too (with --without-compilers)")
    parser.add_argument("--home", type=Path, metavar="DIR", help="a new home directory, with all caches")
    parser.add_argument("--shipped", type=Path, metavar="DIR", help="directory of shipped kernels")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="write the kernels of this run there, to be shipped")
    options = parser.parse_args()
    if options.without_c and not options.without_compilers:
        parser.error("--without-c needs --without-compilers")
    if options.pack and not options.home:
        parser.error("--pack needs --home: other kernels would be written too")
    if options.home:
        use_home(options.home)
    # Without the option, shipped kernels of this environment do not take part.
    os.environ["DSV4_KERNELS_SHIPPED"] = str((options.shipped or Path(os.devnull)).absolute())
    with tempfile.TemporaryDirectory() as folder:
        hidden = {}
        if options.without_compilers:
            hidden = absent.hide(Path(folder), c=options.without_c)
            # Choices made with the compilers, for the same versions, are invalid now.
            os.environ["DSV4_KERNELS_CACHE"] = str(Path(folder, "kernels"))
        measure(options, hidden)


def use_home(home: Path) -> None:
    """Make `home`, a new directory, the home directory of this process, with all caches.

    Raises:
        SystemExit: it is not empty.
    """
    home.mkdir(parents=True, exist_ok=True)
    if any(home.iterdir()):
        raise SystemExit(f"--home {home}: is not empty")
    folders = {
        "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer", "TILELANG_CACHE_DIR": "tilelang", "XDG_CACHE_HOME": "cache",
        "DSV4_KERNELS_CACHE": "kernels", "TMPDIR": "tmp",
    }  # fmt: skip
    os.environ["HOME"] = str(home.absolute())
    for variable, folder in folders.items():
        os.environ[variable] = str((home / folder).absolute())
    (home / "tmp").mkdir()


def compiled_by_triton() -> dict[str, Any]:
    """Return the kernels and launchers in Triton's cache that are no shipped files: their number and names."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    kernels = sorted(file.stem for file in cache.glob("*/*.cubin"))
    modules = sorted(file.name.partition(".")[0] for file in cache.glob("*/*.so") if not file.is_symlink())
    return {"kernels": len(kernels), "launchers": len(modules), "names": [*kernels, *sorted(set(modules))]}


@contextlib.contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold the lock of `file`, if any, during the block."""
    if file is None:
        yield
        return
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def measure(options: argparse.Namespace, hidden: dict[str, Any]) -> None:
    """Start an engine, run the measurements selected by `options` and write them with the `hidden` packages."""
    os.environ["DSV4_KERNELS"] = options.kernels
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # As set by `dsv4 up`: a team of threads for each of thousands of tensors takes longer than one thread.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    compilations = Compilations()
    result: dict[str, Any] = {"model": options.model, "kernels": options.kernels, **hidden}

    def keep(**found: Any) -> None:
        result.update(found, compilations=len(compilations.seen), compiled=compilations.seen[:20])
        options.out.write_text(json.dumps(result))

    llm = start(options, options.speculative)
    ready = time.time() - BEGUN
    if options.home:
        result["compiled_at_start"] = compiled_by_triton()
        print("compiled by Triton before it was ready:", result["compiled_at_start"], flush=True)
    # Added after the start, because vLLM's set-up of logging removes handlers from its loggers.
    logging.getLogger("vllm.utils.jit_monitor").addHandler(compilations)
    generate(llm, prompts(1, 5), 1)
    if hidden:
        keep(compilers=absent.seen())
        print("compilers available to vLLM:", result["compilers"], flush=True)
    keep(ready_s=ready, first_token_s=time.time() - BEGUN)
    print(f"ready after {ready:.1f} s, first token after {result['first_token_s']:.1f} s", flush=True)
    with locked(options.lock):
        steps = Steps(llm)
        found = {}
        for batch in options.batches:
            found[batch] = decode_steps(llm, steps, batch, 1024)
            keep(decode=found)
            print(batch, {k: v for k, v in found[batch].items() if k not in ("top_us", "layers")}, flush=True)
        keep(prefill={n: prefill(llm, steps, n) for n in options.prefills})
        if options.host_profile:
            options.host_profile.write_text(host_profile(llm, options.prefills[0]))
        questions = prompts(options.prompts, options.longest)
        for name in options.answers:
            answered: list[dict[str, Any]] = []
            # Stored one by one: if a kernel is compiled for each length, the time may not suffice for all.
            for answer in answers(llm, questions, alone=name == "alone"):
                answered.append(answer)
                keep(**{name: answered})
        keep(drafts=acceptance(llm))
    spent = {n: {k: v for k, v in one.items() if k != "top_us"} for n, one in result["prefill"].items()}
    print("measured", spent, result["drafts"], flush=True)
    if options.mixed:
        before = len(compilations.seen)
        served = mixed.serve(llm, options.mixed, options.max_len, lambda: locked(options.lock))
        keep(mixed={**served, "compiled": compilations.seen[before:]})
        print("mixed load:", result["mixed"], flush=True)
    print(f"compilations after ready: {len(compilations.seen)}", *compilations.seen[:10], sep="\n  ", flush=True)
    if options.home:
        keep(compiled_in_all=compiled_by_triton())
        print("compiled by Triton in all:", result["compiled_in_all"], flush=True)
    if options.pack:
        pack(options.pack)


def pack(directory: Path) -> None:
    """Write the kernels in Triton's cache to `directory`, from which other processes and machines take them."""
    import torch

    from dsv4_kernels.arch import detect
    from dsv4_kernels.precompile import pack as pack_cache

    arch = detect(torch.device("cuda"))
    if arch is None:
        raise SystemExit("--pack: the kernels have no tables for this GPU")
    packed = pack_cache([Path(os.environ["TRITON_CACHE_DIR"])], directory, arch)
    size = sum(packed["files"].values()) >> 20
    print(f"packed {len(packed['kernels'])} kernels for {arch} into {directory}, {size} MiB", flush=True)


if __name__ == "__main__":
    main()
