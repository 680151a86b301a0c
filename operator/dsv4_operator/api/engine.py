"""`spec.engine`: vLLM, its image, its sizes and its limits."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictBool

from dsv4_operator.api.cluster import ImagePullPolicy, SecretName
from dsv4_operator.api.parts import Count, SpecPart
from dsv4_operator.api.values import CONTROL, TEXT, Between, BoundedDuration, BoundedQuantity, Matches
from dsv4_runtime.contract.kernels import PROVIDERS, Op

_ENV_NAME = Matches(
    r"[A-Za-z_][A-Za-z0-9_]*", "is not the name of an environment variable; use letters, digits and _", 256
)
_IMAGE = Matches(
    r"[a-z0-9][\w./:-]*(@sha256:[0-9a-f]{64})?", "is not the name of an image; write for example NAME@sha256:DIGEST"
)


_PAIR = "|".join(f"{op}=({'|'.join(providers)})" for op, providers in PROVIDERS.items())
_KERNELS = Matches(
    rf"|off|auto|({_PAIR})( *, *({_PAIR}))*",
    "is not a choice of kernels; write off, auto, or OPERATION=PROVIDER with commas, for example "
    f"{Op.MOE}={PROVIDERS[Op.MOE][-1]}; operations: {', '.join(Op)}",
    512,
)
_Word = Annotated[str, Matches(rf"[^{CONTROL}]*", "has a control character; remove it", 8192, shown=r"")]
"""Text that goes to the engine, which may have line breaks in it. It may be a secret, so no refusal shows it."""


class Executor(StrEnum):
    """Mechanism by which vLLM starts its workers and speaks to them."""

    RAY_V2 = "RayV2"
    """Ray actors and message queues."""
    RAY_LEGACY = "RayLegacy"
    """Ray's compiled graphs; only in images up to vLLM 0.32."""
    MP = "MP"
    """Processes of one machine."""


class CudagraphMode(StrEnum):
    """Part of a step that is replayed from a recorded graph."""

    AUTO = "Auto"
    """Backend that is known to work on the machines with the image."""
    NONE = "None"
    """Nothing: every kernel is launched by itself (`--enforce-eager`)."""
    PIECEWISE = "Piecewise"
    FULL = "Full"
    FULL_DECODE_ONLY = "FullDecodeOnly"
    FULL_AND_PIECEWISE = "FullAndPiecewise"


class KvCacheDtype(StrEnum):
    """Number formats of the KV cache."""

    AUTO = "Auto"
    """Type that the model needs: `fp8` on accelerators."""
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"
    NVFP4_DS_MLA = "nvfp4_ds_mla"


class SpeculativeMethod(StrEnum):
    """Method by which drafts are made; the heads are part of the checkpoint."""

    NONE = "None"
    MTP = "MTP"
    """The multi-token prediction layer of the checkpoints of April 2026."""
    DSPARK = "DSpark"
    """The draft stages of the checkpoints since July 2026."""


class EnvVar(SpecPart):
    """One environment variable."""

    name: Annotated[str, _ENV_NAME]
    """Its name. Those that dsv4 sets itself are refused."""
    value: _Word
    """Its value, in quotes if it looks like a number."""


class SpeculativeSpec(SpecPart):
    """Speculative decoding: drafts of several tokens, checked in one step."""

    method: SpeculativeMethod = SpeculativeMethod.NONE
    """`None`, `MTP` or `DSpark`; the checkpoint decides which of them it can do."""
    tokens: Annotated[Count, Field(ge=1, le=16)] | None = None
    """Tokens of a draft. Default: what the checkpoint's heads were trained for."""


_Bound = Annotated[BoundedDuration, Between("1ms", "8760h", "2m")]


class EngineTimeouts(SpecPart):
    """Bounds; passing one is a failure with a cause of its own."""

    staging: _Bound | None = None
    """For the weights to be in place on every machine. Default: from the size of the model."""
    formation: _Bound = 120.0
    """From the start of Ray until every member has joined."""
    load: _Bound | None = None
    """From the start of vLLM until it answers. Default: from the size of the model."""
    first_token: _Bound | None = None
    """For the checked completion that makes an engine ready. Default: `2m` on CPU, else a minute more than one step."""
    execute_model: _Bound | None = None
    """For one step of the engine; the engine gives up after it. Default: `5m` on CPU, `15m` on accelerators, whose
    first steps may compile kernels."""
    drain: _Bound = 20.0
    """For requests that are open when a healthy engine is to end, by a change, a restart or a suspension: the engine
    takes no new ones and finishes these first. And once more for a member, from the request to stop until all of its
    processes have ended."""


class EngineSpec(SpecPart):
    """vLLM: sizes, limits, and what else to hand to it."""

    image: Annotated[str, _IMAGE] | None = None
    """The container image, by digest (`NAME@sha256:…`): a tag may mean another build tomorrow. `dsv4 up` starts no
    container and uses the vLLM beside it. Default on a cluster: the operator's own `--runtime-image`."""
    image_pull_policy: ImagePullPolicy | None = None
    """On a cluster: `IfNotPresent`, `Always` or `Never`. Default: that of Kubernetes."""
    image_pull_secrets: Annotated[tuple[SecretName, ...], Field(max_length=8)] = ()
    """On a cluster: Secrets that nodes need to fetch the image."""
    profile: Annotated[str, Matches(TEXT, "has a control character; remove it", 64)] | None = None
    """Profile of the image, by its name, for example `vllm-0.33`. Default: from `image` and hardware."""
    executor: Executor = Executor.RAY_V2
    """`RayV2`, `RayLegacy` (images up to vLLM 0.32) or `MP` (groups of one machine)."""
    max_model_len: Annotated[Count, Field(ge=128, le=1_048_576)] | None = None
    """Longest request in tokens, prompt and answer together. Default: from the model and the machines."""
    max_num_seqs: Annotated[Count, Field(ge=1, le=512)] = 4
    """Requests that are computed at the same time; further ones wait."""
    max_num_batched_tokens: Annotated[Count, Field(ge=64, le=65_536)] = 2048
    """Tokens of one step, which bounds the memory of activations."""
    async_scheduling: StrictBool = True
    """Prepare the next step while one runs. It doubles the KV cache that every request reserves; not on CPU, and never
    with `RayLegacy`, which cannot."""
    gpu_memory_utilization: Annotated[float, Field(ge=0.1, le=0.99, strict=True)] | None = None
    """Share of a device's memory that the engine may take. Default: from the machine. Not with `kvCacheMemory`."""
    kv_cache_memory: Annotated[BoundedQuantity, Between("1Mi", "1Ei")] | None = None
    """Memory for the KV cache of each rank. Default: from the model and the machines."""
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """Number format of the KV cache: `Auto`, `fp8`, `fp8_ds_mla`, `nvfp4_ds_mla`; images differ."""
    cudagraph_mode: CudagraphMode = CudagraphMode.AUTO
    """`Auto`, `None`, `Piecewise`, `Full`, `FullDecodeOnly` or `FullAndPiecewise`."""
    speculative: SpeculativeSpec = SpeculativeSpec()
    """Speculative decoding."""
    kernels: Annotated[str, _KERNELS] = "off"
    """Provider of the operations of a layer on accelerators: `off`, vLLM's own kernels; `auto`, by what each provider
    is seen to do on this card; or `moe=bundled,mla_decode=stock,…`, where what is not named is as in `auto`."""
    extra_args: Annotated[tuple[_Word, ...], Field(max_length=64)] = ()
    """Further command line arguments for vLLM. Flags that dsv4 sets itself, and flags that the image does not know, are
    refused."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=128)] = ()
    """Further environment variables of every member. Unknown names of vLLM, Ray, NCCL and Triton are refused."""
    timeouts: EngineTimeouts = EngineTimeouts()
    """Bounds for the steps of a start and for one step of the engine."""
