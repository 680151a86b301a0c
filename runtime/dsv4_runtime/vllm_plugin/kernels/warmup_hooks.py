"""The hooks around vLLM's warm-up and memory profile: what is compiled before it serves."""

from __future__ import annotations

import inspect
from types import ModuleType

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.hooks import Hook, HookMismatchError


def _profile(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.warmup import after_precompile

    worker = module.Worker
    worker.determine_available_memory = after_precompile(worker.determine_available_memory)


def _profiled_graphs(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.warmup import before_profiled_capture

    runner = module.GPUModelRunner
    runner.capture_model = before_profiled_capture(runner.capture_model)


def _warmup(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.warmup import around_kernel_warmup

    module.kernel_warmup = around_kernel_warmup(module.kernel_warmup)  # type: ignore[attr-defined]


def _attention_warmup(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.warmup import before_attention

    name = "deepseek_v4_sparse_mla_attention_warmup"
    setattr(module, name, before_attention(getattr(module, name)))


def _flashinfer_sampler(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.sampling import without_flashinfer

    module.flashinfer_sampler_supported = without_flashinfer(module.flashinfer_sampler_supported)  # type: ignore[attr-defined]


def _prefill_warmup(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.warmup import every_alignment

    kernel = module.CombineTopkSwaIndicesKernel
    kernel.get_warmup_keys = every_alignment(kernel.get_warmup_keys)


def _gather_warmup(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.warmup import every_gather

    every_gather(module.DequantizeAndGatherKCacheKernel)


def _sampling_warmup(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.sampling import before_profile

    worker = module.Worker
    worker.determine_available_memory = before_profile(worker.determine_available_memory)


def _ahead(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.compile_ahead import before_device

    module.Worker.init_device = before_device(module.Worker.init_device)


def _ahead_of_weights(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.compile_ahead import after_model

    module.initialize_model = after_model(module.initialize_model)  # type: ignore[attr-defined]


def _cache_ahead(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.cache_ahead import announcing_attention

    module.initialize_model = announcing_attention(module.initialize_model)  # type: ignore[attr-defined]


def _ahead_of_jit_warmup(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.compile_ahead import before_jit_warmup

    module.kernel_warmup = before_jit_warmup(module.kernel_warmup)  # type: ignore[attr-defined]


def _draft_inputs(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.warmup import every_block

    known = inspect.signature(module.prepare_dflash_inputs).parameters.keys()
    if missing := sorted({"input_batch", "block_table", "num_query_per_req"} - known):
        raise HookMismatchError(f"it has no parameter {missing[0]}")
    module.prepare_dflash_inputs = every_block(module.prepare_dflash_inputs)  # type: ignore[attr-defined]


WARM_UP_HOOKS = (
    Hook(tuple(Op), "vllm.v1.worker.gpu_worker", "Worker.determine_available_memory", ("self",), _profile),
    Hook(
        tuple(Op),
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.capture_model",
        ("self", "profile_only"),
        _profiled_graphs,
    ),
    # Before the next one, whose processes are to compile while this waits for its own.
    Hook((), "vllm.v1.worker.gpu_worker", "kernel_warmup", ("worker", "process_local_only"), _ahead_of_jit_warmup),
    Hook(tuple(Op), "vllm.v1.worker.gpu_worker", "kernel_warmup", ("worker", "process_local_only"), _warmup),
    Hook(
        tuple(Op),
        "vllm.model_executor.warmup.kernel_warmup",
        "deepseek_v4_sparse_mla_attention_warmup",
        ("worker",),
        _attention_warmup,
    ),
    Hook((), "vllm.v1.sample.ops.topk_topp_sampler", "flashinfer_sampler_supported", (), _flashinfer_sampler),
    Hook((), "vllm.v1.worker.gpu_worker", "Worker.determine_available_memory", ("self",), _sampling_warmup),
    Hook((), "vllm.v1.worker.gpu_worker", "Worker.init_device", ("self",), _ahead),
    Hook(
        (),
        "vllm.model_executor.model_loader.base_loader",
        "initialize_model",
        ("vllm_config", "prefix", "model_class", "model_config"),
        _ahead_of_weights,
    ),
    Hook(
        tuple(Op),
        "vllm.model_executor.model_loader.base_loader",
        "initialize_model",
        ("vllm_config", "prefix", "model_class", "model_config"),
        _cache_ahead,
    ),
    Hook(
        (),
        "vllm.models.deepseek_v4.common.ops.cache_utils",
        "CombineTopkSwaIndicesKernel.get_warmup_keys",
        ("self", "vllm_config"),
        _prefill_warmup,
    ),
    Hook(
        (),
        "vllm.models.deepseek_v4.common.ops.cache_utils",
        "DequantizeAndGatherKCacheKernel.warmup_inputs",
        ("self", "compile_key"),
        _gather_warmup,
    ),
    # Of DSpark too. vLLM 0.33 has one parameter more than 0.32.
    Hook((), "vllm.v1.worker.gpu.spec_decode.dflash.speculator", "prepare_dflash_inputs", None, _draft_inputs),
)
