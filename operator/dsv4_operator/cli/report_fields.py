"""Permitted fields of a report (`dsv4 report`). Pure.

The models are the complete list. A text is a word of a fixed vocabulary, a version, a digest or a commit; every other
text becomes `other` or is left out. Therefore a report cannot contain prompts, keys, names, addresses or paths, from a
deployment or from a file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from dsv4_operator.api import (
    ConditionStatus,
    ConditionType,
    CudagraphMode,
    DeploymentPhase,
    Executor,
    GroupPhase,
    Hardware,
    KvCacheDtype,
    NetworkMode,
    Reason,
    RolloutStrategy,
    SpeculativeMethod,
    TablesPlace,
    Variant,
)
from dsv4_operator.api.values import format_time, parse_time
from dsv4_operator.cli.sources.base import STOPPED
from dsv4_operator.planning.catalog import machines, models
from dsv4_operator.planning.images import profiles
from dsv4_operator.planning.images.surface import library
from dsv4_operator.planning.memory import FitVerdict
from dsv4_operator.verify.speed import PROFILES, PromptClass
from dsv4_runtime.contract import KV_CACHE, Cause, Report
from dsv4_runtime.contract.kernels import ON_REQUEST, PROVIDERS, KernelChoiceError, Op, parse_kernel_choice

SCHEMA = 1
KIND = "dsv4-report"
OTHER = "other"
"""Replacement of a word that is not in the vocabulary of its field."""

MOST_GROUPS, MOST_FAILURES, MOST_ROWS, MOST_KERNEL_SETS = 512, 512, 256, 8
_LARGEST = 10**15


def _known(*words: str, of: Callable[[], Iterable[str]] = tuple) -> BeforeValidator:
    """Return the validator of a text that is one of `words` or `of()`, else `other`."""
    vocabulary = functools.cache(lambda: frozenset({*words, *map(str, of())}))

    def word(value: object) -> str | None:
        if value is None:
            return None
        return str(value) if isinstance(value, str) and value in vocabulary() else OTHER

    return BeforeValidator(word)


def _matching(pattern: str) -> BeforeValidator:
    """Return the validator of a text that matches `pattern`, else None."""
    return BeforeValidator(lambda value: value if isinstance(value, str) and re.fullmatch(pattern, value) else None)


def _figure(value: object) -> int | float | None:
    """Return a number; None for other values, so that a strange status or file never prevents a report."""
    # Also of integers that are no floats, infinity and NaN.
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
    return value if number else None  # type: ignore[return-value]


def _moment(value: object) -> float | None:
    try:
        return parse_time(value)
    except (ValueError, TypeError, OverflowError):
        return None


def _figures(value: object) -> dict[str, Any]:
    """Return the known figures of a check: numbers, and short lists of numbers."""
    found: dict[str, Any] = {}
    for key, each in value.items() if isinstance(value, Mapping) else ():
        row = [_figure(one) for one in each[:32]] if isinstance(each, list) else _figure(each)
        if key in FIGURES and row is not None and not (isinstance(row, list) and None in row):
            found[key] = row
    return found


def _setting(value: object) -> bool | int | float | str:
    if isinstance(value, bool):
        return value
    if (number := _figure(value)) is not None:
        return number
    if isinstance(value, str):
        if value in _setting_words():
            return str(value)
        with suppress(KernelChoiceError):
            parse_kernel_choice(value)
            return value
    return OTHER


@functools.cache
def _setting_words() -> frozenset[str]:
    enums = (Variant, Hardware, TablesPlace, Executor, KvCacheDtype, CudagraphMode, SpeculativeMethod)
    words = {str(word) for enum in (*enums, NetworkMode, RolloutStrategy) for word in enum}
    return frozenset(words | {profile.name for profile in profiles()})


@functools.cache
def _surface_words() -> frozenset[str]:
    """Return the names of all flags and variables of the catalog's images and their libraries."""
    found: set[str] = set()
    for profile in profiles():
        found |= {*profile.surface.flag_names(), *profile.surface.env, *profile.extra_env, *profile.extra_flags}
        found = found.union(*(library(name)[1] for name in profile.libraries))
    return frozenset(found)


def _check_names() -> Iterator[str]:
    from dsv4_operator.cli.verify import ACCURACY, CHECKS

    yield from (check.name for check in CHECKS)
    yield from (f"{ACCURACY}.{task}" for task in TASKS)


def _fault_names() -> Iterator[str]:
    from dsv4_operator.cli.recovery import FAULTS

    return (fault.name for fault in FAULTS)


def _skip_reasons() -> Iterator[str]:
    from dsv4_operator.verify import endpoint

    return iter(endpoint.Reason)


SETTINGS = (
    "replicas", "model.variant", "model.tables", "model.size",
    "topology.hardware", "topology.nodesPerGroup", "topology.devicesPerNode", "topology.tensorParallelSize",
    "topology.pipelineParallelSize", "topology.expertParallel",
    "engine.profile", "engine.executor", "engine.maxModelLen", "engine.maxNumSeqs", "engine.maxNumBatchedTokens",
    "engine.asyncScheduling", "engine.gpuMemoryUtilization", "engine.kvCacheMemory", "engine.allowTight",
    "engine.kvCacheDtype", "engine.cudagraphMode", "engine.speculative.method", "engine.speculative.tokens",
    "engine.kernels", "engine.timeouts.load", "engine.timeouts.executeModel",
    "network.mode", "network.fabric.requireRDMA", "network.fabric.minBusBandwidthGbps",
    "recovery.maxRestarts", "recovery.window", "recovery.backoff.base", "recovery.backoff.max",
    "rollout.strategy", "gateway.holdTimeout",
)  # fmt: skip
"""Fields below `spec` in a report: numbers, booleans and words of the API."""
TASKS = (
    "dsv4_arithmetic", "gsm8k", "gsm8k_cot", "gsm8k_cot_zeroshot", "ifeval", "mgsm_direct_zh", "mmlu_pro",
    "bbh_cot_fewshot", "drop", "triviaqa", "humaneval", "mbpp", "minerva_math",
)  # fmt: skip
"""Tasks of lm-eval in a report; others become `other`."""
FIGURES = frozenset({
    "accuracy", "minimum", "standard_error",
    "attempts", "characters", "chars_per_token", "chunks", "common_prefix_other_seed", "common_prefix_same_seed",
    "continuations", "correct", "decisive_differences", "depths", "drafts", "equal", "equal_continuations", "events",
    "found", "largest_difference", "largest_usage", "max_model_len", "mean_difference", "median_margin", "noise",
    "p99_difference", "per_position", "positions", "preemptions", "prompt_tokens", "prompts", "questions",
    "reasoning_characters", "requests", "scale",
    "scale_error", "seconds", "sentences", "smallest_effect", "tie", "ties", "tokens", "tokens_per_second",
    "tokens_per_step", "top1_agreement", "topk_overlap",
})  # fmt: skip
TERMS = (
    KV_CACHE, "weights", "activations", "rotary tables, top-k buffer", "MoE scratch", "attention in the profile",
    "images in the profile",
    "attention workspace", "indexer workspace", "non-torch memory", "load format", "NCCL in the profile",
    "NCCL buffers", "CUDA graphs", "CUDA context", "host and Ray", "engine processes", "worker and Ray processes",
    "prefill peak", "reserve",
)  # fmt: skip
KERNELS = ("marlin", "deepgemm", "cutlass", "triton", "flashmla", "flashinfer", "cuda", "tilelang", "cute", "gate")
FABRIC_CHECKS = (
    "kernel", "rdma", "port", "speed", "pcie", "twins", "networks", "mtu", "gid", "memlock", "nofile", "gpu",
    "bandwidth", "peer", "peers",
)  # fmt: skip
FABRIC_REASONS = (
    "KernelReservesMemory", "NoDevice", "UnknownDevice", "NoUsablePort", "NotSelected", "NotEthernet", "LinkDown",
    "NoInterface", "InterfaceDown", "NoAddress", "DefaultRoute", "NoGid", "NoDeviceFile", "SlowLink", "ReducedPcie",
    "UnusedTwin", "SharedInterface", "SharedNetwork",
    "MtuBelowPlan", "SmallMtu", "WrongGidIndex", "StaleGids", "LockedMemoryLimit",
    "OpenFilesLimit", "DuplicateAddress", "NoCommonNetwork", "PortInUse", "NoReply", "OneWay", "PathMtu", "TcpBroken",
    "NothingReceived", "RedirectedCopies", "BrokenCopies",
)  # fmt: skip
"""Reasons of `dsv4 doctor`, whose package only agents import."""
SIGNALS = (
    "exit", "process", "peer", "timeout", "log", "completion", "preflight", "staging", "start", "steps", "api", "link",
    "gpu",
)  # fmt: skip
WARNINGS = {
    "clock": re.compile(r"GPU ([0-9]{1,3}) runs at ([0-9]{1,6}) of ([0-9]{1,6}) MHz"),
    "temperature": re.compile(r"GPU ([0-9]{1,3}) has ([0-9]{1,3})() °C"),
    "power": re.compile(r"GPU ([0-9]{1,3}) is slowed by its power limit of ([0-9]{1,6}) of ([0-9]{1,6}) W"),
}
"""By kind, the begin of an agent's warning with the GPU, the value and its maximum."""

Number = Annotated[int | float | None, BeforeValidator(_figure)]
Flag = Annotated[bool | None, BeforeValidator(lambda value: value if isinstance(value, bool) else None)]
Moment = Annotated[
    float | None, BeforeValidator(_moment), PlainSerializer(format_time, return_type=str, when_used="json-unless-none")
]
# Two or three numbers: an IPv4 address has four.
Version = Annotated[str | None, _matching(r"[0-9]{1,4}(\.[0-9]{1,4}){1,2}((a|b|rc|\.dev|\.post)[0-9]{1,6})?")]
Digest = Annotated[str | None, _matching(r"sha256:[0-9a-f]{64}")]
Commit = Annotated[str | None, _matching(r"[0-9a-f]{40}")]
MachineWord = Annotated[str, _known(of=lambda: (each.id for each in machines()))]
CauseWord = Annotated[str, _known(of=lambda: Cause)]
ProviderWord = Annotated[str, _known(*KERNELS, *ON_REQUEST, *{name for names in PROVIDERS.values() for name in names})]
GroupPhaseWord = Annotated[str, _known(of=lambda: GroupPhase)]
SurfaceWord = Annotated[str, _known(of=_surface_words)]
LibraryWord = Annotated[str, _known(of=lambda: (name for each in profiles() for name in each.libraries))]


class Gpu(Report):
    """A GPU of the machine of the command."""

    machine: MachineWord
    memory_bytes: Number = None


class MachinePart(Report):
    """Kind of machine, and its driver."""

    id: MachineWord
    title: Annotated[str, _known(of=lambda: (each.title for each in machines()))]
    hardware: Annotated[str, _known(of=lambda: Hardware)]
    memory_bytes: Number = None
    """Of one accelerator, or of the machine if both share it."""
    driver: Version = None
    gpus: tuple[Gpu, ...] = Field(default=(), max_length=64)


class FabricPort(Report):
    """A port towards other machines."""

    rdma: Flag = None
    mtu: Number = None
    speed_mbit: Number = None


class FabricCheck(Report):
    """A check of `dsv4 doctor`, without its text."""

    name: Annotated[str, _known(*FABRIC_CHECKS)]
    level: Annotated[str, _known("ok", "warn", "fail", "skipped")]
    reason: Annotated[str | None, _known(*FABRIC_REASONS)] = None
    value: Number = None


class FabricPart(Report):
    """Network of the machine of the command."""

    transport: Annotated[str, _known("RDMA", "sockets", "unknown")] = "unknown"
    """That NCCL can use with the ports of this machine."""
    ports: tuple[FabricPort, ...] = Field(default=(), max_length=64)
    checks: tuple[FabricCheck, ...] = Field(default=(), max_length=MOST_ROWS)


class VersionsPart(Report):
    """Versions of dsv4 and of the engine."""

    dsv4: Version = None
    profile: Annotated[str, _known(of=lambda: (each.name for each in profiles()))] = OTHER
    own_build: Flag = None
    vllm: Annotated[str, _known(of=lambda: (each.vllm for each in profiles()))] = OTHER
    libraries: tuple[LibraryWord, ...] = Field(default=(), max_length=16)
    image_digest: Digest = None


class ModelPart(Report):
    """Checkpoint by its name in the catalog."""

    checkpoint: Annotated[str, _known(of=lambda: (each.name for each in models()))] = OTHER
    source: Annotated[str, _known("nano", "path", "huggingFace", "s3", "http", "sharedPath")] = OTHER
    revision: Commit = None
    """Of a repository in the catalog."""


class SettingPart(Report):
    """A field of the specification."""

    field: Annotated[str, _known(*SETTINGS)]
    value: Annotated[bool | int | float | str, BeforeValidator(_setting)]


class GroupFigure(Report):
    """A measured size of one group."""

    group: Number
    bytes: Number


class MemoryTerm(Report):
    """A term of the memory plan, with the sizes measured at the latest starts."""

    name: Annotated[str, _known(*TERMS)]
    in_budget: Flag = None
    planned_bytes: Number = None
    least_bytes: Number = None
    most_bytes: Number = None
    measured: tuple[GroupFigure, ...] = Field(default=(), max_length=MOST_GROUPS)


class MemoryPart(Report):
    """Memory plan of a group."""

    verdict: Annotated[str, _known(of=lambda: FitVerdict)]
    rank: Number = None
    """The tightest rank, of which the terms are."""
    memory_bytes: Number = None
    used_bytes: Number = None
    tokens: Number = None
    concurrency: Number = None
    terms: tuple[MemoryTerm, ...] = Field(default=(), max_length=MOST_ROWS)


class Standing(Report):
    """A tried provider of an operation."""

    provider: ProviderWord
    slowness: Number = None
    excluded: Flag = None


class Operation(Report):
    """Provider of an operation, with the evidence for the choice."""

    op: Annotated[str, _known(of=lambda: Op)]
    provider: ProviderWord
    changed: Flag = None
    """Whether another provider computes it than the chosen one."""
    next: ProviderWord | None = None
    speedup: Number = None
    standings: tuple[Standing, ...] = Field(default=(), max_length=16)


class KernelSet(Report):
    """Providers of the groups with an equal choice."""

    groups: tuple[Number, ...] = Field(default=(), max_length=MOST_GROUPS)
    operations: tuple[Operation, ...] = Field(default=(), max_length=32)


class CheckResult(Report):
    """Result of a check of `dsv4 verify`, without its text."""

    name: Annotated[str, _known(of=_check_names)]
    status: Annotated[str, _known("ok", "failed", "skipped")]
    reason: Annotated[str | None, _known(of=_skip_reasons)] = None
    seconds: Number = None
    figures: Annotated[dict[str, Any], BeforeValidator(_figures)] = Field(default_factory=dict)


class VerifyPart(Report):
    """Results of `dsv4 verify`."""

    quick: Flag = None
    seconds: Number = None
    exit_code: Number = None
    engine: Version = None
    max_model_len: Number = None
    results: tuple[CheckResult, ...] = Field(default=(), max_length=MOST_ROWS)

    def count(self, status: str) -> int:
        """Return the number of results with a status."""
        return sum(result.status == status for result in self.results)


class Quantiles(Report):
    """Distribution of a time."""

    mean: Number = None
    p50: Number = None
    p95: Number = None
    p99: Number = None


_Quantiles = Annotated[
    Quantiles, BeforeValidator(lambda value: value if isinstance(value, Mapping | Quantiles) else {})
]


class BenchRun(Report):
    """A row of `dsv4 bench`."""

    profile: Annotated[str, _known(of=lambda: (each.name for each in PROFILES))] = OTHER
    prompt_class: Annotated[str, _known(of=lambda: PromptClass)] = OTHER
    concurrency: Number = None
    requests: Number = None
    failed: Number = None
    input_tokens: Number = None
    output_tokens: Number = None
    requests_per_second: Number = None
    output_tokens_per_second: Number = None
    decode_tokens_per_second: Number = None
    prefill_tokens_per_second: Number = None
    ttft_seconds: _Quantiles = Quantiles()
    tpot_seconds: _Quantiles = Quantiles()
    request_seconds: _Quantiles = Quantiles()
    acceptance_rate: Number = None
    joules_per_output_token: Number = None


class BenchPart(Report):
    """Results of `dsv4 bench`."""

    runs: tuple[BenchRun, ...] = Field(default=(), max_length=MOST_ROWS)


class RecoveryStrike(Report):
    """One fault of `dsv4 bench recovery`. Seconds count from the signal."""

    cause: CauseWord = OTHER
    level: Number = None
    rank: Number = None
    detect_seconds: Number = None
    recover_seconds: Number = None
    outage_seconds: Number = None
    requests: Number = None
    lost: Number = None


class RecoveryRow(Report):
    """The repetitions of one fault."""

    fault: Annotated[str, _known(of=lambda: _fault_names())] = OTHER
    repetitions: Number = None
    requests: Number = None
    lost: Number = None
    detect_seconds: Number = None
    recover_seconds: Number = None
    outage_seconds: Number = None
    samples: Annotated[
        tuple[RecoveryStrike, ...], BeforeValidator(lambda value: value if isinstance(value, list | tuple) else ())
    ] = Field(default=(), max_length=MOST_ROWS)


class RecoveryPart(Report):
    """Results of `dsv4 bench recovery`."""

    clients: Number = None
    runs: tuple[RecoveryRow, ...] = Field(default=(), max_length=MOST_ROWS)


class GroupPart(Report):
    """State of a group."""

    index: Number
    phase: GroupPhaseWord
    serving_seconds: Number = None
    """Since the first checked completion of the present engine."""
    incarnation: Number = None
    engine_generation: Number = None
    total_restarts: Number = None
    kv_tokens: Number = None
    kv_planned_tokens: Number = None
    kv_concurrency: Number = None


class FailurePart(Report):
    """A failure and its recovery."""

    group: Number
    time: Moment = None
    cause: CauseWord
    level: Number = None
    detected_by: Annotated[str | None, _known(*SIGNALS)] = None
    rank: Number = None
    incarnation: Number = None
    engine_generation: Number = None
    recover_seconds: Number = None


class ConditionPart(Report):
    """A condition, without its message."""

    type: Annotated[str, _known(of=lambda: ConditionType)]
    status: Annotated[str, _known(of=lambda: ConditionStatus)]
    reason: Annotated[str, _known(of=lambda: Reason)]
    since: Moment = None


class WarningPart(Report):
    """A warning of a member."""

    group: Number
    rank: Number
    kind: Annotated[str, _known(*WARNINGS)]
    gpu: Number = None
    value: Number = None
    maximum: Number = None


class SetupReport(Report):
    """The document of a report."""

    schema_version: Number = Field(default=SCHEMA, alias="schema")
    kind: Annotated[str, _known(KIND)] = KIND
    time: Moment = None
    phase: Annotated[str, _known(STOPPED, of=lambda: DeploymentPhase)]
    age_seconds: Number = None
    machine: MachinePart
    fabric: FabricPart
    versions: VersionsPart
    model: ModelPart
    specification: tuple[SettingPart, ...] = Field(default=(), max_length=MOST_ROWS)
    flags: tuple[SurfaceWord, ...] = Field(default=(), max_length=MOST_ROWS)
    """Names of further flags and variables of the engine, without values."""
    memory: MemoryPart | None = None
    kernels: tuple[KernelSet, ...] = Field(default=(), max_length=MOST_KERNEL_SETS)
    verify: VerifyPart | None = None
    bench: BenchPart | None = None
    recovery: RecoveryPart | None = None
    groups: tuple[GroupPart, ...] = Field(default=(), max_length=MOST_GROUPS)
    failures: tuple[FailurePart, ...] = Field(default=(), max_length=MOST_FAILURES)
    conditions: tuple[ConditionPart, ...] = Field(default=(), max_length=32)
    warnings: tuple[WarningPart, ...] = Field(default=(), max_length=MOST_ROWS)

    def setting(self, field: str) -> bool | int | float | str | None:
        """Return a value of the specification; None if it is not set."""
        return next((each.value for each in self.specification if each.field == field), None)
