"""Child process of `test_equivalence.py`: compares vLLM's distributions with transformers' and writes figures as JSON.

Usage: `python equivalence_transformers.py MODEL REQUESTS ANSWERS FIGURES`, the first three in the format of
`equivalence_vllm.py`. The reference computes in float32 from the same bfloat16 weights. FIGURES gets the distance of
vLLM's log-probabilities from the reference, per variant of the reference and per prompt. Variant `fp8 cache` also
rounds the cache entries as vLLM's `fp8_ds_mla` cache does, unlike transformers; the variants `without …` omit one
mechanism each, to show that the comparison would detect it. `bfloat16` compares transformers with itself, multiplying
in bfloat16 and in float32.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from transformers_reference import distribution, fp8_cache, load


@contextmanager
def plain(model: Any) -> Iterator[None]:
    yield


@contextmanager
def without_sinks(model: Any) -> Iterator[None]:
    parameters = [layer.self_attn.sinks for layer in model.model.layers]
    saved = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.fill_(-1e4)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)


@contextmanager
def half_window(model: Any) -> Iterator[None]:
    whole = model.config.sliding_window
    model.config.sliding_window = whole // 2
    try:
        yield
    finally:
        model.config.sliding_window = whole


def without_compressed(layer_type: str) -> Callable[[Any], Any]:
    """Hide the compressed entries of all layers of one type from the attention."""

    @contextmanager
    def variant(model: Any) -> Iterator[None]:
        compressors = [
            layer.self_attn.compressor for layer in model.model.layers if layer.self_attn.layer_type == layer_type
        ]

        def hide(module: Any, inputs: Any, output: Any) -> Any:
            entries, bias = output
            return entries, None if bias is None else torch.full_like(bias, float("-inf"))

        handles = [compressor.register_forward_hook(hide) for compressor in compressors]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return variant


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "plain": plain,
    "fp8 cache": fp8_cache,
    "without sinks": without_sinks,
    "without half the window": half_window,
    "without ratio 4": without_compressed("compressed_sparse_attention"),
    "without ratio 128": without_compressed("heavily_compressed_attention"),
}

ON_THE_LONGEST = ("plain", "fp8 cache", "without ratio 128")  # the other variants differ on short prompts, in less time


def figures(reference: torch.Tensor, measured: torch.Tensor) -> dict[str, float]:
    """Compare log-probabilities `[positions, vocab]`: absolute differences in nats, and the share of equal choices."""
    difference = (reference - measured).abs()
    return {
        "positions": float(len(difference)),
        "mean": difference.mean().item(),
        "p99": difference.flatten().kthvalue(int(0.99 * difference.numel())).values.item(),
        "max": difference.max().item(),
        "same choice": (reference.argmax(-1) == measured.argmax(-1)).float().mean().item(),
    }


def main() -> None:
    model_path, requests_path, answers_path, figures_path = sys.argv[1:]
    prompts = json.loads(Path(requests_path).read_text())["score"]
    answers = [torch.tensor(answer) for answer in json.loads(Path(answers_path).read_text())["scored"]]
    model, wrong = load(model_path)
    longest = len(prompts) - 1
    variants: dict[str, list[dict[str, float]]] = {name: [] for name in (*VARIANTS, "bfloat16")}
    with torch.inference_mode():
        for number, (tokens, answer) in enumerate(zip(prompts, answers, strict=True)):
            for name, variant in VARIANTS.items():
                if number == longest and name not in ON_THE_LONGEST:
                    continue
                with variant(model):
                    variants[name].append(figures(distribution(model, tokens), answer))
            if number != longest:
                exact = distribution(model, tokens)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    variants["bfloat16"].append(figures(exact, distribution(model, tokens)))
    Path(figures_path).write_text(json.dumps({"loading": wrong, "variants": variants}))


if __name__ == "__main__":
    main()
