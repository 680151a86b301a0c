"""Compare every bundled operation with its float64 reference inside a running vLLM, layer by layer.

    python -m benchmarks.gpu.layers MODEL --out layers.json --page layers.md

The engine runs in this process and eagerly, with all operations bundled. While it serves a few prompts, the reference
of each run of an operation runs on the same inputs: the engine's activations, weights, caches, slots and block tables.
Errors are measured as defined by the operation's contract (`dsv4_kernels.registry`); the worst error of each layer is
kept, separately for steps with prompts and steps that only decode. `benchmarks/gpu/samples.py` defines the compared
part of a run. Streams are synchronized before every run, so a missing wait between streams is not detected.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import Steps, generate, prompts, start

ALONE = ((600, 1), (2558, 4), (9, 1))
"""Lengths and generated tokens of prompts served alone; the second step after 2558 tokens ends windows."""
TOGETHER = (9, 126, 255, 509, 636, 1022, 1535, 2500)
"""Lengths of the prompts served together: in each of the next four steps windows of 4 and of 128 tokens end."""
TOKENS = 5
MODEL = "vllm.models.deepseek_v4.nvidia.model"
COLUMNS = 8
"""Layers in one table of the page."""
NAMES = {"rms": "relative RMS", "diff": "diff", "outside": "share of elements outside"}


def prompt(tokens: int, shift: int = 0) -> list[int]:
    """Return a prompt of exactly `tokens` tokens; prompts of different `shift` have no beginning in common."""
    return [5 + (token + 31 * shift) % 490 for token in prompts(2, tokens)[1]]


@contextlib.contextmanager
def layers_noted(recorder: Any, layer: type) -> Iterator[None]:
    """Set the running layer in `recorder` during the block; decoder layers (class `layer`) run in order."""
    original: Callable[..., Any] = layer.forward  # type: ignore[attr-defined]

    @functools.wraps(original)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.layer = str(recorder.entered)
        recorder.entered += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            recorder.layer = "model"

    layer.forward = forward  # type: ignore[attr-defined]
    try:
        yield
    finally:
        layer.forward = original  # type: ignore[attr-defined]


def record_steps(worker: Any, recorder: Any, steps: list[dict[str, Any]]) -> None:
    """Record every step of vLLM's `worker` with `recorder`, and append a description of each to `steps`."""
    original = worker.execute_model

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        counts = list(getattr(scheduled, "num_scheduled_tokens", {}).values())
        if not counts:
            return original(scheduled, *args, **kwargs)
        kind, before, begun = "prefill" if max(counts) > 1 else "decode", recorder.compared, time.perf_counter()
        with recorder.step(kind):
            result = original(scheduled, *args, **kwargs)
        step = {
            "kind": kind,
            "requests": len(counts),
            "tokens": sum(counts),
            "compared": recorder.compared - before,
            "seconds": round(time.perf_counter() - begun, 3),
        }
        steps.append(step)
        print(step, f"{len(recorder.failures)} failures, {sum(recorder.left_out.values())} left out", flush=True)
        return result

    worker.execute_model = execute_model


def serve(llm: Any, recorder: Any, steps: list[dict[str, Any]], keep: Callable[[], None]) -> None:
    """Serve the prompts with all runs recorded; `keep` is called after each."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(recorder.attached())
        stack.enter_context(layers_noted(recorder, importlib.import_module(MODEL).DeepseekV4DecoderLayer))
        record_steps(Steps(llm).worker, recorder, steps)
        for tokens, count in ALONE:
            generate(llm, [prompt(tokens)], count)
            keep()
        generate(llm, [prompt(tokens, shift + 1) for shift, tokens in enumerate(TOGETHER)], TOKENS)
        keep()


def _number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}"


def _order(layer: str) -> tuple[bool, int]:
    return (True, 0) if layer == "model" else (False, int(layer))


def _line(rows: Mapping[tuple[str, str], Any], layers: list[str], output: str, measure: str, limit: float) -> list[str]:
    """Return the cells of one operation's output: for each layer the worst errors of prefill and of decode."""
    cells = []
    for layer in layers:
        pair = []
        for kind in ("prefill", "decode"):
            row = rows.get((layer, kind))
            value = row["outputs"].get(output, {}).get(measure) if row else None
            pair.append(f"**{_number(value)}**" if value is not None and not value <= limit else _number(value))
        cells.append("–" if pair == ["–", "–"] else " / ".join(pair))
    return cells


def _table(result: Mapping[str, Any], layers: list[str]) -> list[str]:
    """Return the lines of one table with a column for each of `layers`."""
    heads = [
        "operation",
        "output: measure",
        "limit",
        "calls",
        *(layer if layer == "model" else f"layer {layer}" for layer in layers),
    ]
    lines = [f"| {' | '.join(heads)} |", "|---|---|---:|---:|" + "---:|" * len(layers)]
    for name, outputs in result["tolerances"].items():
        rows = {(r["layer"], r["kind"]): r for r in result["rows"] if r["operation"] == name and r["layer"] in layers}
        calls = (sum(r["calls"] for (_, at), r in rows.items() if at == kind) for kind in ("prefill", "decode"))
        counted = " / ".join(map(str, calls))
        for output, measures in outputs.items() if rows else ():
            for measure, limit in measures.items():
                what = f"{output}: {NAMES[measure]}"
                cells = [name, what, _number(limit), counted, *_line(rows, layers, output, measure, limit)]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(result: Mapping[str, Any]) -> str:
    """Return `result` in Markdown."""
    layers = sorted({row["layer"] for row in result["rows"]}, key=_order)
    steps = result.get("steps", [])
    lines = [
        f"Errors in the engine: {result.get('device', 'unknown device')}, {result['compared']} runs compared in "
        f"{len(steps)} steps, {result['beyond']} with an output beyond its tolerance.",
        "",
        "Worst error of prefill steps / of decode steps, against float64 on the engine's own inputs; "
        "“model” is the part after the last layer. Beyond the limit: in bold.",
    ]
    for first in range(0, len(layers), COLUMNS):
        lines += ["", *_table(result, layers[first : first + COLUMNS])]
    beyond = [row for row in result["rows"] if row["beyond"]]
    lines += [""] if beyond else []
    for row in beyond:
        where = f"{row['operation']}, layer {row['layer']}, {row['kind']}"
        lines.append(f"- {where}: {row['beyond']} of {row['calls']} runs, the first: {row['example']}")
    for title, key in (
        ("Not compared, by error", "failures"),
        ("Left out for time", "left_out"),
        ("Wrote nothing", "wrote_nothing"),
    ):
        if result[key]:
            lines += ["", f"{title}:", "", *(f"- {name}: {count}" for name, count in result[key].items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Start the engine, serve the prompts, write the results; return 1 if an error ended the run early."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--max-len", type=int, default=9216)
    parser.add_argument("--memory", type=float, default=0.5)
    parser.add_argument(
        "--seconds", type=float, default=85.0, help="time limit of comparisons; later runs are only counted"
    )
    parser.set_defaults(eager=True, no_jit_warmup=False, prefill_graphs=[])
    options = parser.parse_args()
    from dsv4_runtime.contract.kernels import ALL_BUNDLED, VARIABLE

    os.environ[VARIABLE] = str(ALL_BUNDLED)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    begun = time.perf_counter()
    llm = start(options, None)
    generate(llm, [prompt(5)], 1)
    print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)
    import torch

    # Imported late: the first import of the Triton kernels determines their Triton.
    from benchmarks.gpu.recorder import Recorder

    recorder = Recorder(options.seconds)
    steps: list[dict[str, Any]] = []
    about = {"model": options.model, "device": torch.cuda.get_device_name(), "kernels": os.environ[VARIABLE]}

    def keep(**more: Any) -> None:
        result = {**about, "steps": steps, **recorder.result(), **more}
        options.out.write_text(json.dumps(result, indent=1))
        if options.page is not None:
            options.page.write_text(page(result))

    try:
        serve(llm, recorder, steps, keep)
    except Exception:
        traceback.print_exc()
        keep(ended=traceback.format_exc(limit=-3))
        return 1
    print(page({**about, "steps": steps, **recorder.result()}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
