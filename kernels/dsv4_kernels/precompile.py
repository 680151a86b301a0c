"""Compile plans before they are made, without a GPU: `python -m dsv4_kernels.precompile ARCH MULTIPROCESSORS`.

The first engine on a machine compiles a hundred kernels, one after another in its own process. They are known as soon
as the layers of the model exist: this program compiles them in processes of its own while the weights are loaded, and
the engine finds them in Triton's cache. Each line of standard input is a plan, a JSON object:

    {"plan": "dsv4_kernels.router.api:RouterPlan", "args": [8192, 4096, 256, 6], "options": {}}

"device" among the arguments stands for the torch device. Standard output has a line for each compiled plan with its
time, or with the error. An empty line stops the program once all plans are compiled; the end of the input stops it at
once, so that it does not outlive a killed engine. Five minutes without a line stop it too, since it holds memory.

`pack` writes the compiled kernels of a cache to a folder that other machines and users take them from (`attach`). The
groups of files in a Triton cache contain absolute paths: a cache that was copied or moved is compiled again without a
message. Shipped folders therefore have no groups; `attach` writes groups that name the shipped files, which may be
read-only, into the cache of the process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia_compiler
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from dsv4_kernels.arch import Arch, TargetGPU, compile_for
from dsv4_kernels.plan import Plan

DEVICE = "device"
"""Stands for the torch device among a plan's arguments."""
_LOCK = "dsv4-precompile.lock"
_MARKS = "dsv4-precompiled"
_PR_SET_PDEATHSIG = 1
_IDLE_SECONDS = 300
_REPORTING = threading.Lock()
_SHARES = 4
"""Most processes that compile one plan; the largest would else take as long as all others together."""
SHIPPED = "DSV4_KERNELS_SHIPPED"
"""Environment variable: the directory of shipped kernels."""
LOGGER = logging.getLogger("vllm.dsv4")
_GROUP = "__grp__"
# Prefix of Triton's files that list the files of a kernel.
_MANIFEST = "manifest.json"
_LIBCUDA = "libcuda.so.1"
_ABANDONED_SECONDS = 86400.0
"""Least age of the unfinished folder of a writer that was killed; writing takes minutes."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class CompileOnly:
    """Triton driver without a device: `arch` is the target of the compiler.

    Triton keeps the target of a device number, so a process that compiles for several needs a number for each.
    """

    launches = False

    def __init__(self, arch: Arch, device: int = 0) -> None:
        self._target, self._device = GPUTarget("cuda", arch.spec.capability, 32), device

    def get_current_target(self) -> GPUTarget:
        """Return the target to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the number of the only device."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


def line(plan: type[Plan], *args: Any, **options: Any) -> str:
    """Return the line of the input that describes `plan(*args, **options)`; `DEVICE` where the device is."""
    name = f"{plan.__module__}:{plan.__qualname__}"
    # Sizes may be integers of another kind, as NumPy's are.
    return json.dumps({"plan": name, "args": args, "options": options}, sort_keys=True, default=int)


def compiled_mark(described: str, target: TargetGPU) -> Path:
    """Return the file that is there once the plan of a `line` has been compiled into Triton's cache for `target`.

    It lies in that cache, so that it goes with it; another release of Triton or of the kernels has other marks.
    """
    whole = json.dumps([described, target.arch, target.multiprocessors, triton.__version__, _sources()])
    return Path(triton.knobs.cache.dir, _MARKS, hashlib.sha256(whole.encode()).hexdigest())


def was_used_before() -> bool:
    """Return whether any plan has been compiled into Triton's cache."""
    return any(Path(triton.knobs.cache.dir, _MARKS).glob("*"))


@functools.cache
def _sources() -> str:
    """Return the SHA-256 of the package's Python files."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def launch_nothing(target: TargetGPU) -> None:
    """Make every later launch in this process compile its kernel for `target` without launching it.

    As `JITFunction.warmup` does; the launches are those of the plans' own code, with tensors on "meta".
    """
    compile_for(target)
    driver.set_active(CompileOnly(target.arch))
    run = JITFunction.run

    @functools.wraps(run)
    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        # Not returned: a `Launcher` would keep and launch it.
        if compiled is not None and compiled.hash not in made:
            made.add(compiled.hash)
            compile_launcher(compiled)

    made: set[str] = set()
    JITFunction.run = compile_only


def prepare_forks() -> None:
    """Do the work that each process would repeat before its first kernel.

    torch imports its compiler for arithmetic on "meta", and Triton hashes all its files for the keys of its cache.
    """
    _ = torch.empty(1, device="meta") * 2
    triton_key()


def compile_launcher(kernel: Any) -> None:
    """Compile the host launcher of a kernel, where Triton has a C compiler build one for each kind of arguments.

    Triton 3.6 does so at the first launch of a kernel, in a quarter of a second each; later versions share one.
    """
    if hasattr(nvidia, "make_launcher"):
        # A missing launcher is reported by the launch.
        with contextlib.suppress(Exception):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


@contextlib.contextmanager
def share_of_kernels(index: int, count: int) -> Iterator[list[str]]:
    """Compile one of `count` shares of the launched kernels inside the context; yield the names of the compiled ones.

    Processes that launch the same kernels compile all of them together, each kernel once.
    """
    taken: list[str] = []

    def is_of_another(*, key: str, fn: Any, **_: Any) -> bool:
        # Hashed even so: some kernels' hashes depend on those before (see `hash_helpers`).
        share = zlib.crc32(f"{fn.jit_function.cache_key}{key}".encode()) % count
        if share == index:
            taken.append(fn.name)
        return share != index

    previous = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = is_of_another
    try:
        yield taken
    finally:
        triton.knobs.runtime.jit_cache_hook = previous


class ShippedError(Exception):
    """Shipped kernels cannot be used or written; the text has the reason."""


def shipped_directory() -> Path:
    """Return the directory of shipped kernels: `DSV4_KERNELS_SHIPPED`, else `share/dsv4/kernels` of this Python."""
    return Path(os.environ.get(SHIPPED) or Path(sys.prefix, "share", "dsv4", "kernels"))


def compiler_identity(arch: Arch) -> dict[str, str]:
    """Return the properties of this environment on which the keys and the files of compiled kernels depend.

    Triton's keys contain a hash of its files, the version of ptxas, the sources of a kernel and some environment
    variables. The launchers are modules of this Python version and processor.
    """
    ptxas = re.findall(r"V[0-9.]+", nvidia_compiler.get_ptxas_version(arch.spec.capability))
    flags = get_cache_invalidating_env_vars()
    return {
        "arch": str(arch),
        "platform": " ".join([platform.machine(), platform.system(), *platform.architecture()]),
        "python": str(sysconfig.get_config_var("EXT_SUFFIX")),
        "triton": f"{triton.__version__} {hashlib.sha256(triton_key().encode()).hexdigest()[:12]}",
        "ptxas": ptxas[0] if ptxas else "unknown",
        "flags": " ".join(f"{name}={value}" for name, value in sorted(flags.items())),
        "kernels": _sources()[:12],
        "vllm": _version("vllm"),
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def pack(caches: Sequence[Path], shipped: Path, arch: Arch) -> dict[str, Any]:
    """Write the kernels of Triton caches for `arch`, with launchers and marks, to `shipped`/`arch`.

    The content depends on the kernels alone: no paths, times or names of machines. An existing folder is replaced.
    All caches have to be of this environment, whose properties the manifest states.

    Returns:
        The manifest: `environment` (`compiler_identity`), `kernels` (key to the file with the metadata), `others`
        (files of other keys), `marks`, `files` with their sizes in bytes, and `sha256` of each file.

    Raises:
        ShippedError: the caches have no kernel for `arch`.
        OSError: the folder cannot be written.
    """
    _remove_abandoned(shipped, arch)
    written = shipped / f".{arch}.{uuid.uuid4().hex}"
    kernels: dict[str, str] = {}
    others: list[str] = []
    files: dict[str, int] = {}
    digests: dict[str, str] = {}

    def copy(source: Path, key: str, name: str) -> None:
        (written / key).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, written / key / name)
        # Of the copy: the cache may be that of a running engine.
        content = (written / key / name).read_bytes()
        files[f"{key}/{name}"], digests[f"{key}/{name}"] = len(content), hashlib.sha256(content).hexdigest()

    try:
        for folder in sorted(folder for cache in caches for folder in cache.iterdir()):
            if not folder.is_dir() or folder.name in (_MARKS, *kernels):
                continue
            # Not the file beside it that an interrupted `attach` has left.
            if (group := next(folder.glob(f"{_GROUP}*.json"), None)) is not None:
                name, paths = group.name.removeprefix(_GROUP), _children(group)
                if paths is not None and _target_of(paths.get(name)) == arch.spec.capability:
                    kernels[folder.name] = name
                    for child, path in sorted(paths.items()):
                        copy(path, folder.name, child)
                continue
            for file in sorted(folder.glob("*")):
                if file.is_file() and (name := f"{folder.name}/{file.name}") not in files:
                    others.append(name)
                    copy(file, folder.name, file.name)
        if not kernels:
            raise ShippedError(f"{', '.join(map(str, caches))}: no compiled kernels for {arch}")
        marks = sorted({mark.name for cache in caches for mark in (cache / _MARKS).glob("*") if mark.exists()})
        manifest: dict[str, Any] = {
            "environment": compiler_identity(arch), "dsv4": _version("dsv4-kernels"),
            "kernels": kernels, "others": others, "marks": marks, "files": files, "sha256": digests,
        }  # fmt: skip
        (written / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        _replace_folder(shipped / arch, written)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    return manifest


def _remove_abandoned(shipped: Path, arch: Arch) -> None:
    """Remove the folders of killed writers. By their age, because writers on other machines cannot be seen."""
    for folder in shipped.glob(f".{arch}.*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder)


def _replace_folder(target: Path, written: Path) -> None:
    """Rename `written` to `target`, also while others do the same. An engine finds the folder whole or not at all; the
    latter only in the moment between two renames where the file system cannot exchange folders.

    `written` is the earlier folder afterwards, or is not there.

    Raises:
        OSError: the folder cannot be written.
    """
    while not _exchange(written, target):
        earlier = target.with_name(f"{written.name}.old")
        with contextlib.suppress(FileNotFoundError):
            target.rename(earlier)
        try:
            written.rename(target)
        except OSError as error:
            # Another writer was between the two renames.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return
        finally:
            shutil.rmtree(earlier, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders atomically; False if one is missing or the file system does not support it, as NFS."""
    # Missing in the C library of old systems.
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = os.fsencode(one), os.fsencode(other)
    return exchange is not None and exchange(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


def _children(group: Path) -> dict[str, Path] | None:
    """Return the files of a group by name; None if one is missing."""
    try:
        found = {name: Path(path) for name, path in json.loads(group.read_text())["child_paths"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return found if all(map(Path.is_file, found.values())) else None


def _target_of(metadata: Path | None) -> int | None:
    """Return the compute capability for which the kernel with this file of metadata was compiled."""
    try:
        capability = None if metadata is None else json.loads(metadata.read_text())["target"]["arch"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return capability if isinstance(capability, int) else None


def attach(shipped: Path, arch: Arch) -> int | None:
    """Make the kernels in `shipped`/`arch` part of this process's Triton cache; return their number.

    Groups that name the shipped files, and links to the launchers; existing entries stay. None if there is no such
    folder. Concurrent callers write the same.

    Raises:
        ShippedError: the kernels are of another environment, or a file is missing, or its content another one.
        OSError: the cache cannot be written.
    """
    folder = shipped / arch
    if not (folder / _MANIFEST).is_file():
        return None
    manifest = read_manifest(folder)
    if found := differences(manifest["environment"], compiler_identity(arch)):
        raise ShippedError("; ".join(found))
    for name, size in manifest["files"].items():
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise ShippedError(f"{name}: {error.strerror}") from error
        if len(content) != size:
            raise ShippedError(f"{name} has {len(content)} bytes, needs {size}")
        # After a power cut a file may have its size and no content.
        if hashlib.sha256(content).hexdigest() != manifest["sha256"].get(name):
            raise ShippedError(f"{name} differs from the file that was compiled (SHA-256)")
    cache = Path(triton.knobs.cache.dir)
    members: dict[str, dict[str, str]] = {key: {} for key in manifest["kernels"]}
    for name in manifest["files"]:
        key, _, child = name.partition("/")
        if key in members:
            members[key][child] = str((folder / name).absolute())
    for key, metadata in manifest["kernels"].items():
        group = cache / key / f"{_GROUP}{metadata}"
        if _children(group) is None:
            with _replacing(group) as temporary:
                temporary.write_text(json.dumps({"child_paths": members[key]}))
    for name in manifest["others"]:
        # False also for a link to a file that is gone.
        if not (cache / name).exists():
            with _replacing(cache / name) as temporary:
                temporary.symlink_to((folder / name).absolute())
    for name in manifest["marks"]:
        # A link, so that the mark ends with the shipped kernels.
        if not (cache / _MARKS / name).exists():
            with _replacing(cache / _MARKS / name) as temporary:
                temporary.symlink_to((folder / _MANIFEST).absolute())
    return len(manifest["kernels"])


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """Yield the path of a new file that takes the place of `file` after the block; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Containers that share a cache may have equal process ids.
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    yield temporary
    temporary.replace(file)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the shipped kernels in `folder`.

    Raises:
        ShippedError: it cannot be read or lacks a field.
    """
    try:
        found: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
        kinds = {"environment": dict, "kernels": dict, "files": dict, "sha256": dict, "others": list, "marks": list}
        lacking = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
    except (OSError, ValueError, AttributeError) as error:
        raise ShippedError(f"{_MANIFEST} cannot be read ({type(error).__name__})") from error
    if lacking:
        raise ShippedError(f"{_MANIFEST} has no {', '.join(lacking)}")
    return found


def differences(shipped: Mapping[str, Any], here: Mapping[str, str]) -> list[str]:
    """Return a text for each property of an environment (`compiler_identity`) that differs `here`."""
    return [
        f"{name} is {shipped.get(name)!r}, here it is {value!r}"
        for name, value in here.items()
        if shipped.get(name) != value
    ]


def use_shipped(arch: Arch) -> int:
    """Attach the shipped kernels for `arch`, if there are any, and log their number or why they are not used.

    Without them everything is compiled as usual.

    Returns:
        The number of attached kernels.
    """
    shipped = shipped_directory()
    begun = time.monotonic()
    try:
        count = attach(shipped, arch)
    except Exception as error:
        # Also a missing assembler or a damaged manifest: the worker compiles what it needs.
        text = str(error) if isinstance(error, ShippedError | OSError) else f"{type(error).__name__}: {error}"
        LOGGER.warning("dsv4 kernels: the shipped kernels in %s are not used: %s", shipped / arch, text)
        return 0
    if count is not None:
        seconds = time.monotonic() - begun
        LOGGER.info("dsv4 kernels: %s shipped kernels from %s in %.1f s", count, shipped / arch, seconds)
    return count or 0


@contextlib.contextmanager
def without_driver() -> Iterator[None]:
    """Let Triton compile its launchers within this context where the library of NVIDIA's driver is missing.

    They are linked against an empty library of its name, and not loaded.

    Raises:
        ShippedError: there is no C compiler.
    """
    try:
        ctypes.CDLL(_LIBCUDA)
    except OSError:
        pass
    else:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="dsv4-libcuda-") as folder:
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise ShippedError("Triton's launchers need a C compiler: install gcc or set CC")
        command = [compiler, "-shared", f"-Wl,-soname,{_LIBCUDA}", "-o", f"{folder}/{_LIBCUDA}", "-x", "c", os.devnull]
        subprocess.run(command, check=True)
        before, load = triton.knobs.nvidia.libcuda_path, build._load_module_from_path
        # Triton compiles a module again if it cannot be loaded.
        build._load_module_from_path = lambda name, path: ModuleType(name)
        triton.knobs.nvidia.libcuda_path = folder
        try:
            yield
        finally:
            build._load_module_from_path, triton.knobs.nvidia.libcuda_path = load, before


def compile_utilities() -> None:
    """Compile the module with which Triton loads kernels, which needs a C compiler too."""
    # Without a driver it is compiled and not loaded. A missing module is reported by the first launch.
    with contextlib.suppress(Exception):
        nvidia.CudaUtils()


def compile_plan(described: str, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """Compile the kernels of the plan of a `line`, or one of `shares` of them; return line, kernels, seconds, error."""
    begun, error = time.monotonic(), None
    with share_of_kernels(share, shares) as kernels:
        try:
            make_plan(described, torch.device("meta")).warmup()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
    seconds = round(time.monotonic() - begun, 1)
    return {"plan": described, "kernels": len(kernels), "seconds": seconds, "error": error}


def make_plan(described: str, device: torch.device) -> Plan:
    """Make the plan of a `line` on `device`.

    Raises:
        ValueError: the line is no JSON, or the plan cannot have that size.
        AttributeError, ImportError, KeyError, TypeError: there is no such plan, or it takes other arguments.
    """
    wanted = json.loads(described)
    module, _, name = wanted["plan"].partition(":")
    kind: type[Plan] = getattr(importlib.import_module(module), name)

    def place(argument: Any) -> Any:
        return device if argument == DEVICE else argument

    return kind(*map(place, wanted["args"]), **{name: place(one) for name, one in wanted["options"].items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the plans on standard input."""
    parser = argparse.ArgumentParser(prog="python -m dsv4_kernels.precompile", description=__doc__.partition(":")[0])
    parser.add_argument("arch", type=Arch, choices=list(Arch))
    parser.add_argument("multiprocessors", type=int)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    signal.alarm(_IDLE_SECONDS)
    cache = Path(triton.knobs.cache.dir)
    Path(cache, _MARKS).mkdir(parents=True, exist_ok=True)
    with (cache / _LOCK).open("w") as lock, contextlib.ExitStack() as stack:
        # Ranks of one machine compile the same plans: the first fills the cache of the others.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            stack.enter_context(without_driver())
        except ShippedError as error:
            raise SystemExit(str(error)) from error
        launch_nothing(TargetGPU(options.arch, options.multiprocessors))
        torch.set_num_threads(1)
        prepare_forks()
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(
            options.processes, mp_context=context, initializer=_end_with_parent, initargs=(os.getpid(),)
        ) as pool:
            pool.submit(compile_utilities)
            shares = max(1, min(_SHARES, options.processes // _SHARES))
            if not _submit(pool, sys.stdin, TargetGPU(options.arch, options.multiprocessors), shares):
                os._exit(1)


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the request.
        os._exit(1)


def _submit(pool: ProcessPoolExecutor, lines: Iterator[str], target: TargetGPU, shares: int) -> bool:
    """Compile every line once, in `shares`; return whether an empty line ended them."""
    seen: set[str] = set()
    for one in lines:
        signal.alarm(_IDLE_SECONDS)
        if not (described := one.strip()):
            signal.alarm(0)
            return True
        if described in seen:
            continue
        seen.add(described)
        found: list[dict[str, Any]] = []
        for share in range(shares):
            future = pool.submit(compile_plan, described, share, shares)
            future.add_done_callback(functools.partial(_collect, found, shares, target))
    return False


def _collect(found: list[dict[str, Any]], shares: int, target: TargetGPU, done: Future[dict[str, Any]]) -> None:
    """Add a share to those `found` of its plan; print the plan once all are there.

    Called by the thread of the pool, and by the main one for a share that ended before its callback was added.
    """
    if done.cancelled() or done.exception() is not None:
        return
    with _REPORTING:
        found.append(done.result())
        if len(found) < shares:
            return
        errors = [one["error"] for one in found if one["error"] is not None]
        whole = {
            "plan": found[0]["plan"],
            "kernels": sum(one["kernels"] for one in found),
            "seconds": max(one["seconds"] for one in found),
            "error": errors[0] if errors else None,
        }
        if not errors:
            # Without the mark a later start compiles the plan again.
            with contextlib.suppress(OSError):
                mark = compiled_mark(whole["plan"], target)
                mark.unlink(missing_ok=True)  # It may be a link to shipped kernels that are gone.
                mark.touch()
        print(json.dumps(whole), flush=True)


if __name__ == "__main__":
    main()
