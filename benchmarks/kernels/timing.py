"""Timing on a GPU: interleaved CUDA graphs with cold (flushed by reading) and hot L2; ceilings of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """Microseconds: median and interquartile range with a cold L2, median with a hot one."""

    cold: float
    spread: float
    hot: float


class Timer:
    """Times several callables on the same inputs in turn, so that clocks and other load affect all alike."""

    def __init__(self, flush_bytes: int = 256 << 20) -> None:
        # Reading, not writing, empties L2: dirty lines would be written back inside the timed span.
        self._flush = torch.ones(flush_bytes // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")
        self.empty = 0.0
        nothing = torch.zeros(1, device="cuda")
        self.empty = self.time({"empty": lambda: nothing.add_(1.0)})["empty"].cold

    def flush(self) -> None:
        """Evict everything from L2."""
        torch.sum(self._flush, dim=0, out=self._sum)

    def time(self, calls: dict[str, Callable[[], object]], rounds: int = 30) -> dict[str, Times]:
        """Capture each callable in a graph and replay the graphs in turn."""
        return self.replay({name: capture(call) for name, call in calls.items()}, rounds)

    def replay(self, graphs: dict[str, torch.cuda.CUDAGraph], rounds: int = 30) -> dict[str, Times]:
        """Replay captured graphs in turn."""
        cold: dict[str, list[float]] = {name: [] for name in graphs}
        marks = []
        for _ in range(rounds):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self.flush()
                start.record()
                graph.replay()
                end.record()
                marks.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in marks:
            cold[name].append(start.elapsed_time(end) * 1e3)
        hot = {}
        for name, graph in graphs.items():
            samples = []
            for _ in range(5):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(10):
                    graph.replay()
                end.record()
                end.synchronize()
                samples.append(start.elapsed_time(end) * 1e2)
            hot[name] = statistics.median(samples)
        result = {}
        for name, samples in cold.items():
            quarters = statistics.quantiles(samples, n=4)
            result[name] = Times(statistics.median(samples), quarters[2] - quarters[0], hot[name])
        return result


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Warm `call` up on a side stream and capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def ceilings(timer: Timer) -> dict[str, float]:
    """Return GB/s of a large copy (read plus written) and TFLOP/s of a bf16 product on random data."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    # Copied by a kernel: a captured copy uses the copy engine, which is slower.
    copy = timer.time({"copy": lambda: torch.neg(source, out=target)}, rounds=10)["copy"].cold
    n = 8192
    a, b = (torch.randn((n, n), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = timer.time({"mm": lambda: torch.mm(a, b, out=out)}, rounds=10)["mm"].cold
    return {"copy_gbs": 2 * 4 * (1 << 28) / copy / 1e3, "bf16_tflops": 2 * n**3 / product / 1e6}
