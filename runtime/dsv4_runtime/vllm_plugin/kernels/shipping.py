"""Compile the kernels of an engine before any machine runs it, without a GPU: the command below `dsv4 kernels compile`.

    python -m dsv4_runtime.vllm_plugin.kernels.shipping MODEL --arch sm_121 --out DIR

Each architecture has a folder below DIR, from which workers take the kernels before they compile anything
(`dsv4_kernels.precompile.attach`). It contains the plans of the bundled kernels for the shapes of the model's
`config.json`, and with an installed vLLM the kernels that its runner launches and those of its sampler. Kernels whose
keys contain strides of the KV cache follow from vLLM's own planning of the cache, which needs the layers: the first
engine compiles them. `--include CACHE` adds the kernels of a Triton cache with which an engine has served.

The shapes repeat those of the layers (`announce` in this package); a shape that differs is compiled by the engine, as
without shipped kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dsv4_kernels import precompile
from dsv4_kernels.arch import Arch
from dsv4_kernels.fp8.api import GemmPlan, QuantPlan, SiluMulPlan, hopper_from, quantised_tokens
from dsv4_kernels.front.api import NormPlan
from dsv4_kernels.indexer.api import FEW_ROWS, LogitsPlan, QueryPlan, TopkPlan
from dsv4_kernels.mhc.api import HeadPlan, PostPlan, PrePlan
from dsv4_kernels.mla_decode.api import MergePlan
from dsv4_kernels.mla_prefill.api import ListsPlan, PrefillPlan, list_width
from dsv4_kernels.moe.api import MoePlan
from dsv4_kernels.precompile import DEVICE, ShippedError, line
from dsv4_kernels.router.api import RouterPlan
from dsv4_runtime.contract.kernels import VARIABLE
from dsv4_runtime.vllm_plugin.forking import wait_for
from dsv4_runtime.vllm_plugin.kernels import choice, compile_ahead, vllm_api
from dsv4_runtime.vllm_plugin.loading import c128_width

FEW_TOKENS = 32
"""Tokens of the bundled FP8 products where vLLM's CUTLASS computes larger ones (`linear.SMALL`)."""
_HEADS = (8, 16, 32, 64, 128)
_HEAD, _INDEX_HEAD = 512, 128
_SIZES = (
    "hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "num_attention_heads",
    "q_lora_rank", "o_lora_rank", "o_groups", "index_n_heads", "index_topk", "sliding_window", "vocab_size",
    "num_hidden_layers",
)  # fmt: skip
_SECONDS = 1800


@dataclass(frozen=True)
class Engine:
    """An engine to compile for.

    Attributes:
        config: the model's `config.json`.
        tensor_parallel: ranks that share a layer.
        tokens: most tokens of a step.
        requests: most requests of a step.
        context: longest context in tokens.
        drafts: tokens that are drafted for each step.
    """

    config: Mapping[str, Any]
    tensor_parallel: int = 1
    tokens: int = 8192
    requests: int = 64
    context: int = 131_072
    drafts: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "tokens", "requests", "context"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ShippedError(f"--{option} {getattr(self, name)} is too small; write 1 or more")
        lacking = [name for name in _SIZES if not isinstance(self.config.get(name), int)]
        if lacking:
            raise ShippedError(f"config.json has no number {lacking[0]}: it is not of a DeepSeek-V4 model")
        for name in ("num_attention_heads", "o_groups", "moe_intermediate_size"):
            if self.config[name] % self.tensor_parallel:
                raise ShippedError(
                    f"--tensor-parallel {self.tensor_parallel} does not divide {name}, which is {self.config[name]}"
                )


def plans_of(engine: Engine, arch: Arch) -> Iterator[str]:
    """Yield the plans of a rank of `engine` that need no KV cache, as lines of `dsv4_kernels.precompile`."""
    sizes, ranks, tokens = engine.config, engine.tensor_parallel, engine.tokens
    hidden, rank = sizes["hidden_size"], sizes["q_lora_rank"]
    heads, groups = sizes["num_attention_heads"] // ranks, sizes["o_groups"] // ranks
    inter, o_lora = sizes["moe_intermediate_size"] // ranks, sizes["o_lora_rank"]
    experts, k = sizes["n_routed_experts"], sizes["num_experts_per_tok"]
    wanted: dict[int, int] = {}
    for n, width in (
        (rank + _HEAD, hidden), (heads * _HEAD, rank), (hidden, groups * o_lora), (2 * inter, hidden),
        (hidden, inter), (sizes["index_n_heads"] * _INDEX_HEAD, rank),
    ):  # fmt: skip
        most = tokens if hopper_from(arch, n, width, 1) is not None else min(FEW_TOKENS, tokens)
        wanted[width] = max(most, wanted.get(width, 0))
        yield line(QuantPlan, most, width, DEVICE)
        yield line(GemmPlan, most, n, width, None, DEVICE)
    yield line(SiluMulPlan, wanted[inter], inter, DEVICE)
    yield line(NormPlan, wanted[rank], rank, DEVICE, quantised=True)
    if wanted[rank] < tokens:
        yield line(NormPlan, tokens, rank, DEVICE)
    for name in ("mhc_pre", "mhc_pre_broadcast", "mhc_post_pre"):
        yield line(PrePlan, name, tokens, hidden, DEVICE, norms=[True], quantised=wanted[hidden])
    yield line(PostPlan, "mhc_post", tokens, hidden, DEVICE, norms=[True])
    yield line(HeadPlan, "mhc_head", tokens, hidden, DEVICE, norms=[True])
    group = heads // groups * _HEAD
    of_z = quantised_tokens(arch, o_lora, group, groups, arch.spec.multiprocessors)
    yield line(GemmPlan, tokens, o_lora, group, groups, DEVICE, quantised=min(wanted[groups * o_lora], of_z))
    yield line(MergePlan, "mla_merge_o8", 1, tokens, heads, DEVICE)
    # Activations of 8 bits are chosen by evidence, where vLLM rounds them too.
    for a8 in (False, True) if arch is not Arch.SM_90 else (False,):
        yield line(
            MoePlan, tokens=tokens, hidden=hidden, inter=inter, experts=experts, topk=k, a8=a8, device=DEVICE, adds=True
        )
    yield line(RouterPlan, tokens=tokens, hidden=hidden, experts=experts, k=k, device=DEVICE)
    padded, window = next(most for most in _HEADS if heads <= most), sizes["sliding_window"]
    for ratio in sorted({max(1, ratio) for ratio in sizes.get("compress_ratios", (1, 4, 128))}):
        chosen = {1: 0, 4: sizes["index_topk"]}.get(ratio, c128_width(engine.context))
        yield line(PrefillPlan, tokens, padded, list_width(chosen, window), DEVICE, own_output=False)
        yield line(ListsPlan, tokens, chosen, ratio, DEVICE, window=window, own_output=False)
    yield line(QueryPlan, tokens, sizes["index_n_heads"], DEVICE)
    yield line(LogitsPlan, sizes["index_n_heads"], DEVICE)
    # The warm-up also compiles the kernels for many rows.
    yield line(TopkPlan, FEW_ROWS + 1, engine.context, sizes["index_topk"], DEVICE)


def compile_plans(engine: Engine, arch: Arch, cache: Path, processes: int) -> tuple[int, list[str]]:
    """Compile the plans of `engine` into a Triton cache; return their number and the errors."""
    command = [sys.executable, "-m", "dsv4_kernels.precompile", arch, str(arch.spec.multiprocessors)]
    lines = list(dict.fromkeys(plans_of(engine, arch)))
    done = subprocess.run(
        [*command, "--processes", str(processes)],
        input="\n".join([*lines, "", ""]), stdout=subprocess.PIPE, text=True, check=False,
        timeout=_SECONDS, env=_environment(cache),
    )  # fmt: skip
    if done.returncode:
        raise ShippedError(f"{' '.join(command)} ended with {done.returncode}")
    told = {one["plan"]: one["error"] for one in documents(done.stdout) if "plan" in one}
    errors = {one: told.get(one, "the process that compiled it ended") for one in lines}
    return len(told), [f"{one}: {error}" for one, error in errors.items() if error is not None]


def compile_vllm(engine: Engine, arch: Arch, cache: Path, processes: int) -> tuple[int, list[str]]:
    """Compile the kernels of the installed vLLM into a Triton cache; return the number of calls and the errors."""
    command = [sys.executable, "-m", "dsv4_runtime.vllm_plugin.kernels.shipping", "--child", arch, str(processes)]
    done = subprocess.run(
        command, input=json.dumps(vars(engine)), capture_output=True, text=True, check=False,
        timeout=_SECONDS, env=_environment(cache) | {"VLLM_PLUGINS": ""},
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return 0, [f"vLLM: {last[0]}"]
    told = [one for one in documents(done.stdout) if "calls" in one]
    return (told[-1]["calls"], told[-1]["errors"]) if told else (0, ["vLLM: no result of its kernels"])


def documents(output: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines of `output`; libraries write log lines there too."""
    for text in output.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(text), dict):
                yield found


def _environment(cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}


def configuration(engine: Engine) -> Any:
    """Return the part of vLLM's configuration that its kernels' launches depend on."""
    text = SimpleNamespace(**engine.config)
    return SimpleNamespace(
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        scheduler_config=SimpleNamespace(max_num_seqs=engine.requests, max_num_batched_tokens=engine.tokens),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1,
            tensor_parallel_size=engine.tensor_parallel, data_parallel_size=1, pipeline_parallel_size=1,
        ),
        cache_config=SimpleNamespace(block_size=256, cache_dtype="fp8_ds_mla"),
        compilation_config=SimpleNamespace(static_forward_context={}, max_cudagraph_capture_size=engine.requests),
        num_speculative_tokens=engine.drafts,
        reasoning_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(
            get_vocab_size=lambda: engine.config["vocab_size"], hf_text_config=text, hf_config=text,
            dtype=torch.bfloat16, max_model_len=engine.context, logprobs_mode="raw_logprobs", use_fp64_gumbel=False,
        ),
    )  # fmt: skip


def pretend_cuda(arch: Arch) -> None:
    """Make vLLM, which is not imported yet, take this machine for one with a GPU of `arch`."""
    from triton.backends import backends

    for name, backend in backends.items():
        backend.driver.is_active = staticmethod(functools.partial(operator.eq, name, "nvidia"))
    capability = vllm_api.DeviceCapability(*divmod(arch.spec.capability, 10))
    cuda = type(
        "Cuda",
        (vllm_api.Platform,),
        {
            "_enum": vllm_api.PlatformEnum.CUDA,
            "device_name": "cuda",
            "device_type": "cuda",
            "dispatch_key": "CUDA",
            "get_device_capability": classmethod(lambda cls, device_id=0: capability),
        },
    )
    vllm_api.platforms._current_platform = cuda()


def register_layers(engine: Engine, config: Any) -> list[str]:
    """Register the kernels of vLLM's layers in the active registry, as the layers do; return the errors."""
    adapter = vllm_api.adapter()
    errors = []
    for location, calls in adapter.LAYER_KERNELS.items():
        module, _, name = location.partition(":")
        for arguments in calls:
            values = {
                key: engine.config[value] if isinstance(value, str) else value for key, value in arguments.items()
            }
            try:
                getattr(importlib.import_module(module), name).register_warmup(**values)
            except Exception as error:
                errors.append(f"{name}: {type(error).__name__}: {error}")
    return errors


def child(arch: Arch, processes: int) -> None:
    """Compile vLLM's kernels for the engine on standard input; print the number of calls and the errors as JSON."""
    engine = Engine(**json.load(sys.stdin))
    # Of the changes to vLLM's modules only those that add keys to its warm-up.
    os.environ[VARIABLE] = "off"
    choice.install()
    pretend_cuda(arch)
    compile_ahead.use_no_gpu(arch)
    precompile.prepare_forks()
    config = configuration(engine)
    calls: list[Callable[[], None]] = []
    errors = []
    with precompile.without_driver():
        finders: dict[str, Callable[[], list[Callable[[], None]]]] = {
            "runner": functools.partial(compile_ahead.runner_calls, config, processes),
            "sampler": functools.partial(compile_ahead.choice_calls, config),
        }
        for name, find in finders.items():
            try:
                calls += find()
            except Exception as error:
                errors.append(f"{name}: {type(error).__name__}: {error}")
        registry = vllm_api.JitWarmupRegistry(config)
        with registry.activate():
            errors += register_layers(engine, config)
            registered = compile_ahead.registered_kernels()
        calls += compile_ahead.registered_calls(registered)
        pids = compile_ahead.start_compilers(calls, processes)
        good = wait_for(pids, _SECONDS)
    if good < len(pids):
        errors.append(f"{len(pids) - good} of {len(pids)} processes could not compile all of their kernels")
    print(json.dumps({"calls": len(calls), "errors": errors}))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, compile and write the folders."""
    if arguments is None and sys.argv[1:2] == ["--child"]:
        child(Arch(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="directory of a checkpoint, or its config.json")
    parser.add_argument("--arch", type=Arch, nargs="+", required=True, metavar="ARCH", help=", ".join(Arch))
    parser.add_argument("--out", type=Path, default=precompile.shipped_directory())
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a step (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="most requests of a step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=131_072, help="longest context (default: %(default)s)")
    parser.add_argument("--drafts", type=int, default=0, help="tokens drafted for each step (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument(
        "--include", type=Path, nargs="+", default=[], metavar="CACHE", help="Triton caches of engines that have served"
    )
    options = parser.parse_args(arguments)
    try:
        ship(options)
    except (ShippedError, OSError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"dsv4 kernels compile: {error}") from error


def ship(options: argparse.Namespace) -> None:
    """Write a folder for each architecture, and print a line for each.

    Raises:
        ShippedError: the model is unknown, or nothing could be compiled.
        OSError: a file cannot be read or written.
    """
    file = options.model / "config.json" if options.model.is_dir() else options.model
    try:
        config = json.loads(file.read_text())
        # V4.1 has the sizes of the language model in a part of its own.
        config |= config.get("text_config") or {}
    except (ValueError, TypeError, AttributeError, RecursionError) as wrong:
        raise ShippedError(f"{file} is no config.json of a model ({wrong}); name the directory of one") from wrong
    engine = Engine(
        config, options.tensor_parallel, options.tokens, options.requests, options.context,
        options.drafts,
    )  # fmt: skip
    for arch in options.arch:
        with tempfile.TemporaryDirectory(prefix="dsv4-kernels-") as folder:
            cache, begun = Path(folder, "cache"), time.monotonic()
            plans, errors = compile_plans(engine, arch, cache, options.processes)
            calls = 0
            if find_spec("vllm") is not None:
                calls, more = compile_vllm(engine, arch, cache, options.processes)
                errors += more
            packed = precompile.pack([cache, *options.include], options.out, arch)
        size, seconds = sum(packed["files"].values()) >> 20, time.monotonic() - begun
        print(
            f"{arch}: {len(packed['kernels'])} kernels of {plans} plans and {calls} calls of vLLM in {seconds:.0f} s, "
            f"{size} MiB in {options.out / arch}",
            flush=True,
        )
        for error in errors:
            print(f"{arch}: compiled by the engine: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
