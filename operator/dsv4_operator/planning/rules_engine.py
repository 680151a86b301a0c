"""Rules about the image, its flags and variables, and the formats that it can use."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4_operator.api import CudagraphMode, Executor, KvCacheDtype, SpeculativeMethod
from dsv4_operator.planning.images import argument_problems, variable_problem
from dsv4_operator.planning.rule import Rule, Severity
from dsv4_operator.planning.setup import Setup

_SM12X = "vLLM 0.33, models/deepseek_v4/nvidia/model.py, _select_dsv4_attn_cls"
_FP4_INDEXERS = {"mxfp4", "nvfp4"}
_FOREIGN_ATTENTION = {
    "FLASHINFER_MLA_SPARSE": "vLLM refuses it for DeepSeek-V4",
    "FLASHINFER_MLA_SPARSE_SM120": "vLLM refuses it for DeepSeek-V4",
    "FLASHMLA_SPARSE": "its kernels are built for other compute capabilities",
    "FLASHMLA_SPARSE_DSV4": "its kernels are built for other compute capabilities",
}
_ATTENTION = "spec.engine.extraArgs: the attention backend"
_SHORT_STEP_SECONDS = 600
_LEGACY_REQUESTS = 4

OBSOLETE = {
    "VLLM_RPC_TIMEOUT": "is no longer read; use spec.engine.timeouts.executeModel",
    "VLLM_SKIP_INIT_MEMORY_CHECK": "was of a fork; use spec.engine.gpuMemoryUtilization",
    "VLLM_SM120_REFERENCE_DEEPSEEK_V4_ATTENTION": "was of a fork; vLLM has FlashInfer's kernels for SM12x instead",
    "VLLM_TRITON_MLA_SPARSE": "was of a fork; vLLM has FlashInfer's kernels for SM12x instead",
    "VLLM_USE_RAY_COMPILED_DAG": "is no longer read; use spec.engine.executor",
}
"""Variables of well-known recipes that nothing reads any more."""


def _arguments(chosen: Setup) -> Iterator[str]:
    for index, text in argument_problems(chosen.deployment.spec.engine.extra_args, chosen.profile.surface):
        yield f"spec.engine.extraArgs[{index}]: {text}"


def _variables(chosen: Setup) -> Iterator[str]:
    for index, variable in enumerate(chosen.deployment.spec.engine.env):
        if variable.name in OBSOLETE and variable.name not in chosen.profile.extra_env:
            yield f'spec.engine.env[{index}].name: "{variable.name}" {OBSOLETE[variable.name]}, and remove it'
        elif problem := variable_problem(variable.name, variable.value, chosen.profile):
            yield f"spec.engine.env[{index}]: {problem}"


def _empty_variables(chosen: Setup) -> Iterator[str]:
    for index, variable in enumerate(chosen.deployment.spec.engine.env):
        if not variable.value and variable.name.startswith(("NCCL_", "FLASHINFER_", "VLLM_")):
            yield f"spec.engine.env[{index}].value: {variable.name} is empty, which is not the same as not set"


def _executor(chosen: Setup) -> Iterator[str]:
    asked, known = chosen.deployment.spec.engine.executor, chosen.profile.executors
    if asked not in known:
        yield f"spec.engine.executor: {asked} is not part of the image {chosen.profile.name}; use {' or '.join(known)}"


def _mp(chosen: Setup) -> Iterator[str]:
    count = chosen.deployment.spec.topology.nodes_per_group
    if chosen.deployment.spec.engine.executor is Executor.MP and count > 1:
        yield f"spec.engine.executor: MP with {count} machines does not notice dead workers"


def _legacy_requests(chosen: Setup) -> Iterator[str]:
    engine = chosen.deployment.spec.engine
    if engine.executor is Executor.RAY_LEGACY and engine.max_num_seqs > _LEGACY_REQUESTS:
        yield f"spec.engine.maxNumSeqs: {engine.max_num_seqs} requests at the same time with RayLegacy"


def _image_hardware(chosen: Setup) -> Iterator[str]:
    profile = chosen.profile
    if chosen.hardware not in profile.hardware:
        built = ", ".join(profile.hardware)
        yield f"spec.engine.profile: {profile.name} is not built for {chosen.hardware}, but for {built}"


def _unpinned_image(chosen: Setup) -> Iterator[str]:
    image = chosen.deployment.spec.engine.image
    if image is not None and "@sha256:" not in image:
        yield f'spec.engine.image: "{image}" is a tag, which may be another build tomorrow or on another machine'


def _unpinned_code(chosen: Setup) -> Iterator[str]:
    if chosen.gives("--trust-remote-code"):
        yield "spec.engine.extraArgs: --trust-remote-code runs Python of the checkpoint, and DeepSeek-V4 needs none"


def _kv_cache_dtype(chosen: Setup) -> Iterator[str]:
    asked, known = chosen.deployment.spec.engine.kv_cache_dtype, chosen.profile.kv_cache_dtypes
    if asked is not KvCacheDtype.AUTO and asked not in known:
        remedy = f"use {' or '.join(known)}, or leave it out" if known else "leave it out"
        yield f"spec.engine.kvCacheDtype: {asked} is not for DeepSeek-V4 in the image {chosen.profile.name}; {remedy}"


def _drafts(chosen: Setup) -> Iterator[str]:
    asked, heads = chosen.deployment.spec.engine.speculative, chosen.model.speculative
    if asked.method is SpeculativeMethod.NONE:
        if asked.tokens is not None:
            yield f"spec.engine.speculative.tokens: {asked.tokens} without a method; write MTP or DSpark"
        return
    method = asked.method.lower()
    if method not in chosen.profile.speculative:
        image = chosen.profile.name
        yield f"spec.engine.speculative.method: the image {image} has no drafts of {asked.method}; write None"
    elif heads is None or heads.method != method:
        has = {"mtp": "MTP", "dspark": "DSpark"}[heads.method] if heads else "None"
        remedy = f"write {has}"
        if chosen.deployment.spec.model.source.nano is not None:
            remedy += f", or {asked.method} as spec.model.source.nano.drafts"
        yield f"spec.engine.speculative.method: {chosen.model.name} has no heads for {asked.method}; {remedy}"


def _short_drafts(chosen: Setup) -> Iterator[str]:
    image, method = chosen.profile, chosen.deployment.spec.engine.speculative.method
    tokens, least = chosen.draft_tokens, image.dspark_least_tokens
    if method is SpeculativeMethod.DSPARK and tokens < least:
        yield f"spec.engine.speculative.tokens: the image {image.name} refuses drafts of {tokens}; write {least}"


def _long_drafts(chosen: Setup) -> Iterator[str]:
    asked, heads = chosen.deployment.spec.engine.speculative, chosen.model.speculative
    if asked.method is not SpeculativeMethod.NONE and heads and chosen.draft_tokens > heads.tokens:
        yield (
            f"spec.engine.speculative.tokens: {chosen.draft_tokens} is more than {chosen.model.name}'s heads were "
            f"trained for, {heads.tokens}"
        )


def _drafts_memory(chosen: Setup) -> Iterator[str]:
    engine = chosen.deployment.spec.engine
    given = engine.gpu_memory_utilization
    drafting = engine.speculative.method is SpeculativeMethod.MTP
    if drafting and given is not None and given > 0.92 and not chosen.machine.unified_memory and not chosen.on_cpu:
        yield f"spec.engine.gpuMemoryUtilization: {given} with MTP ran out of memory with the first request"


def _fp4_indexer(chosen: Setup) -> Iterator[str]:
    if chosen.machine.sm // 10 != 12:
        return
    settings = chosen.json("--attention-config")
    kind = settings.get("indexer_kv_dtype")
    if kind in _FP4_INDEXERS:
        yield f"spec.engine.extraArgs: indexer_kv_dtype {kind} needs a data-centre GPU; this is {chosen.machine.title}"
    if settings.get("use_fp4_indexer_cache"):
        yield f"spec.engine.extraArgs: use_fp4_indexer_cache needs a data-centre GPU; this is {chosen.machine.title}"


def _attention(chosen: Setup) -> Iterator[str]:
    backend = chosen.value("--attention-backend") or str(chosen.json("--attention-config").get("backend", ""))
    if chosen.machine.sm // 10 != 12 or not backend:
        return
    if problem := _FOREIGN_ATTENTION.get(backend.upper()):
        yield f"{_ATTENTION} {backend} does not serve {chosen.model.name} here: {problem}"
    elif backend.upper().startswith("B12X") and chosen.profile.args.get("--attention-backend") != backend:
        yield f"{_ATTENTION} {backend} is not DeepSeek-V4's in the image {chosen.profile.name}"


def _moe_backend(chosen: Setup) -> Iterator[str]:
    backend = chosen.value("--moe-backend")
    if backend == "deep_gemm_mega_moe" and chosen.machine.sm // 10 == 12:
        yield f"--moe-backend: deep_gemm_mega_moe needs a data-centre GPU; this is {chosen.machine.title}"
    if backend in {"b12x", "flashinfer_b12x"} and chosen.deployment.spec.topology.expert_parallel:
        yield f"spec.topology.expertParallel: the experts of {backend} are divided by rows only"


def _all_reduce(chosen: Setup) -> Iterator[str]:
    topology, mode = chosen.deployment.spec.topology, chosen.deployment.spec.engine.cudagraph_mode
    given = chosen.variable("PYTORCH_CUDA_ALLOC_CONF") or chosen.variable("PYTORCH_ALLOC_CONF") or ""
    shared = topology.devices_per_node > 1 and topology.tensor_parallel > 1 and not chosen.on_cpu
    graphs = mode is not CudagraphMode.NONE and not chosen.gives("--enforce-eager")
    if "expandable_segments:True" not in given or not shared or not graphs:
        return
    if not chosen.profile.expandable_segments and not chosen.gives("--disable-custom-all-reduce"):
        yield "spec.engine.env: expandable_segments:True with graphs over several devices of one machine ends the start"


def _e8m0(chosen: Setup) -> Iterator[str]:
    if chosen.machine.sm // 10 == 12 and chosen.variable("VLLM_USE_DEEP_GEMM_E8M0") == "0":
        yield "spec.engine.env: VLLM_USE_DEEP_GEMM_E8M0=0 is an error with the scales of DeepSeek-V4 on SM12x"


def _eager(chosen: Setup) -> Iterator[str]:
    if chosen.on_cpu:
        return
    if chosen.deployment.spec.engine.cudagraph_mode is CudagraphMode.NONE or chosen.gives("--enforce-eager"):
        yield "spec.engine.cudagraphMode: without graphs a token takes about three times as long"


def _graphs_twice(chosen: Setup) -> Iterator[str]:
    mode = chosen.deployment.spec.engine.cudagraph_mode
    for flag in ("--compilation-config", "--enforce-eager"):
        if mode is not CudagraphMode.AUTO and chosen.gives(flag):
            yield f"spec.engine.extraArgs: {flag} and spec.engine.cudagraphMode {mode} say two things; remove one"


def _short_steps(chosen: Setup) -> Iterator[str]:
    seconds = chosen.deployment.spec.engine.timeouts.execute_model
    if seconds is not None and seconds < _SHORT_STEP_SECONDS and not chosen.on_cpu:
        yield f"spec.engine.timeouts.executeModel: {seconds:g}s is shorter than a step that compiles on a cold machine"


def _cpu_fields(chosen: Setup) -> Iterator[str]:
    """Yield what the CPU build cannot do; without this it would be read by nobody there."""
    if not chosen.on_cpu:
        return
    engine, topology = chosen.deployment.spec.engine, chosen.deployment.spec.topology
    if engine.cudagraph_mode not in {CudagraphMode.AUTO, CudagraphMode.NONE}:
        yield f"spec.engine.cudagraphMode: {engine.cudagraph_mode} has no meaning on CPU"
    if not engine.async_scheduling:
        yield "spec.engine.asyncScheduling: false has no meaning on CPU"
    if topology.expert_parallel:
        yield "spec.topology.expertParallel: true does not run on CPU"
    fabric = chosen.deployment.spec.network.fabric
    if fabric != type(fabric)():
        yield "spec.network.fabric: there is none between members on CPU"


ENGINE_RULES = (
    Rule(
        "unknown-argument", Severity.REFUSE, "a flag that the image's vLLM does not know, or a value that it refuses",
        _arguments, "", "the parser of that vLLM (planning/images/surface)",
    ),
    Rule(
        "unknown-variable", Severity.REFUSE, "a variable of vLLM, Ray, NCCL or Triton that nothing in the image reads",
        _variables, "", "the tables of that vLLM and of the libraries (planning/images/surface)",
    ),
    Rule(
        "empty-variable", Severity.REFUSE, "a variable of NCCL, FlashInfer or vLLM that is set to nothing",
        _empty_variables, "leave it out",
        "https://github.com/Reederey87/dgx-spark-2x-deepseek-v4-flash: an empty NCCL_IB_GID_INDEX ended NCCL",
    ),
    Rule(
        "executor", Severity.REFUSE, "an executor that the image does not have",
        _executor, "", "vLLM, v1/executor/abstract.py: the compiled-DAG executor is gone since 0.33",
    ),
    Rule(
        "mp-machines", Severity.REFUSE, "`MP` with several machines",
        _mp, "write RayV2",
        "vLLM, entrypoints/cli/serve.py run_headless and v1/executor/multiproc_executor.py: only workers of the same "
        "machine are watched, and a follower exits with 0",
    ),
    Rule(
        "legacy-requests", Severity.WARN, "more than 4 requests at the same time with `RayLegacy`",
        _legacy_requests, "lower it to 4, or write RayV2: the compiled graph ended with RayChannelTimeoutError",
        "https://github.com/vllm-project/vllm/issues/40969",
    ),
    Rule(
        "image-hardware", Severity.REFUSE, "an image that is not built for the hardware",
        _image_hardware, "use another image", "the sources of the image profile",
    ),
    Rule(
        "unpinned-image", Severity.WARN, "an image by tag instead of by digest",
        _unpinned_image, "write NAME@sha256:DIGEST",
        "https://github.com/spark-arena/recipe-registry/issues/23: a newer build behind the same tag refused the flags",
    ),
    Rule(
        "remote-code", Severity.WARN, "`--trust-remote-code`",
        _unpinned_code, "remove it", "vLLM, transformers_utils/configs: the configuration class is vLLM's own",
    ),
    Rule(
        "kv-cache-dtype", Severity.REFUSE, "a KV cache format that DeepSeek-V4 does not have in the image",
        _kv_cache_dtype, "", "vLLM 0.33, models/deepseek_v4/attention.py; the sources of the image profile",
    ),
    Rule(
        "speculative-heads", Severity.REFUSE, "drafts for which checkpoint or image have no heads",
        _drafts, "",
        "vLLM 0.33, config/speculative.py; https://github.com/vllm-project/vllm/pull/41834: 0731 has no MTP layer",
    ),
    Rule(
        "short-drafts", Severity.REFUSE, "DSpark drafts shorter than the image's build accepts",
        _short_drafts, "", "https://github.com/vllm-project/vllm/issues/50012",
    ),
    Rule(
        "long-drafts", Severity.WARN, "drafts longer than the heads were trained for",
        _long_drafts, "leave it out: acceptance fell from 24 to 14 % (DSpark, 7); MTP runs one layer several times",
        "https://github.com/vllm-project/vllm/pull/41834",
    ),
    Rule(
        "drafts-memory", Severity.WARN, "MTP with `gpuMemoryUtilization` above 0.92 on a discrete GPU",
        _drafts_memory, "write 0.92", "https://github.com/vllm-project/vllm/issues/41700",
    ),
    Rule(
        "fp4-indexer", Severity.REFUSE, "an indexer cache in FP4 on SM12x",
        _fp4_indexer, "remove it",
        "vLLM 0.33, v1/attention/backends/mla/indexer.py: mxfp4 requires Blackwell data-centre GPUs; "
        "https://github.com/vllm-project/recipes",
    ),
    Rule(
        "attention-backend", Severity.REFUSE, "an attention backend that is not DeepSeek-V4's on SM12x in the image",
        _attention, "remove it, or write FLASHINFER_MLA_SPARSE_DSV4", _SM12X,
    ),
    Rule(
        "moe-backend", Severity.REFUSE, "experts that the machine or the topology does not run",
        _moe_backend, "choose another one, for example marlin",
        "vLLM 0.33, model_executor/layers/fused_moe: deep_gemm_mega_moe.py, experts/*b12x*",
    ),
    Rule(
        "expandable-segments", Severity.REFUSE, "expandable segments, graphs and several devices of one machine",
        _all_reduce, "remove it, or add --disable-custom-all-reduce to spec.engine.extraArgs",
        "https://github.com/vllm-project/vllm/issues/42609",
    ),
    Rule(
        "e8m0", Severity.REFUSE, "`VLLM_USE_DEEP_GEMM_E8M0=0` on SM12x",
        _e8m0, "remove it", "https://github.com/vllm-project/vllm/issues/57486",
    ),
    Rule(
        "eager", Severity.WARN, "no graphs on accelerators",
        _eager, "write Auto",
        "https://github.com/vllm-project/vllm/pull/40899: 5.5 to 6.7 tokens a second, 21 with graphs",
    ),
    Rule(
        "graphs-twice", Severity.REFUSE, "graphs set by a field and by a flag",
        _graphs_twice, "", "the specification itself",
    ),
    Rule(
        "short-steps", Severity.WARN, "a bound of less than 10 minutes for one step on accelerators",
        _short_steps, "write 15m",
        "https://github.com/eugr/spark-vllm-docker/issues/348",
    ),
    Rule(
        "cpu-fields", Severity.REFUSE, "fields that mean nothing on CPU",
        _cpu_fields, "remove it", "the CPU build of vLLM 0.32",
    ),
)  # fmt: skip
"""In the order in which they are told."""
