"""The hooks around vLLM's warm-up and memory profile: what is compiled before it serves."""

from __future__ import annotations

from types import ModuleType

from dsv4_runtime.vllm_plugin.kernels.hooks import Assignment, Hook, Known


def _profile(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.warmup import after_precompile

    worker = module.Worker
    return [(worker, "determine_available_memory", after_precompile(worker.determine_available_memory))]


def _profiled_graphs(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.warmup import before_profiled_capture

    runner = module.GPUModelRunner
    return [(runner, "capture_model", before_profiled_capture(runner.capture_model))]


def _warmup(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.warmup import around_kernel_warmup

    return [(module, "kernel_warmup", around_kernel_warmup(module.kernel_warmup))]


def _attention_warmup(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.warmup import before_attention

    name = "deepseek_v4_sparse_mla_attention_warmup"
    return [(module, name, before_attention(getattr(module, name)))]


def _flashinfer_sampler(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.sampling import without_flashinfer

    return [(module, "flashinfer_sampler_supported", without_flashinfer(module.flashinfer_sampler_supported))]


def _prefill_warmup(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.warmup import every_alignment

    kernel = module.CombineTopkSwaIndicesKernel
    return [(kernel, "get_warmup_keys", every_alignment(kernel.get_warmup_keys))]


def _gather_warmup(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.warmup import every_gather

    return every_gather(module.DequantizeAndGatherKCacheKernel)


def _sampling_warmup(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.sampling import before_profile

    worker = module.Worker
    return [(worker, "determine_available_memory", before_profile(worker.determine_available_memory))]


def _ahead(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.compile_ahead import before_device

    return [(module.Worker, "init_device", before_device(module.Worker.init_device))]


def _ahead_of_weights(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.compile_ahead import after_model

    return [(module, "initialize_model", after_model(module.initialize_model))]


def _cache_ahead(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.cache_ahead import announcing_attention

    return [(module, "initialize_model", announcing_attention(module.initialize_model))]


def _ahead_of_jit_warmup(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.compile_ahead import before_jit_warmup

    return [(module, "kernel_warmup", before_jit_warmup(module.kernel_warmup))]


def _draft_inputs(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.warmup import every_block

    return [(module, "prepare_dflash_inputs", every_block(module.prepare_dflash_inputs))]


_WORKER = "vllm.v1.worker.gpu_worker"
_CACHE_UTILS = "vllm.models.deepseek_v4.common.ops.cache_utils"
_LOADER = "vllm.model_executor.model_loader.base_loader"
_INITIALIZE = ("vllm_config", "prefix", "model_class", "model_config")
_DRAFTS = frozenset({"input_batch", "block_table", "num_query_per_req"})

WARM_UP_HOOKS = (
    Hook((), _WORKER, {"Worker.determine_available_memory": ("self",)}, _profile, bundled=True),
    Hook(
        (),
        "vllm.v1.worker.gpu.model_runner",
        {
            "GPUModelRunner.capture_model": Known(
                ("self", "profile_only"), names=frozenset({"cudagraph_manager", "capture"})
            )
        },
        _profiled_graphs,
        bundled=True,
    ),
    # Before the next one, whose processes are to compile while this waits for its own.
    Hook((), _WORKER, {"kernel_warmup": ("worker", "process_local_only")}, _ahead_of_jit_warmup),
    Hook((), _WORKER, {"kernel_warmup": ("worker", "process_local_only")}, _warmup, bundled=True),
    Hook(
        (),
        "vllm.model_executor.warmup.kernel_warmup",
        {"deepseek_v4_sparse_mla_attention_warmup": ("worker",)},
        _attention_warmup,
        bundled=True,
    ),
    Hook((), "vllm.v1.sample.ops.topk_topp_sampler", {"flashinfer_sampler_supported": ()}, _flashinfer_sampler),
    Hook((), _WORKER, {"Worker.determine_available_memory": ("self",)}, _sampling_warmup),
    Hook((), _WORKER, {"Worker.init_device": ("self",)}, _ahead),
    Hook((), _LOADER, {"initialize_model": _INITIALIZE}, _ahead_of_weights),
    Hook((), _LOADER, {"initialize_model": _INITIALIZE}, _cache_ahead, bundled=True),
    Hook(
        (),
        _CACHE_UTILS,
        {"CombineTopkSwaIndicesKernel.get_warmup_keys": ("self", "vllm_config")},
        _prefill_warmup,
    ),
    Hook(
        (),
        _CACHE_UTILS,
        {
            "DequantizeAndGatherKCacheKernel.CompileKey": None,
            "DequantizeAndGatherKCacheKernel.get_warmup_keys": ("self", "vllm_config"),
            "DequantizeAndGatherKCacheKernel.warmup_inputs": ("self", "compile_key"),
        },
        _gather_warmup,
    ),
    # Of DSpark too. vLLM 0.33 has one parameter more than 0.32.
    Hook(
        (),
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        {"prepare_dflash_inputs": Known(among=_DRAFTS)},
        _draft_inputs,
    ),
)
