"""Plans that are compiled without a GPU, for processes that find the kernels in Triton's cache."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dsv4_kernels import precompile as shipping
from dsv4_kernels.arch import Arch, TargetGPU
from dsv4_kernels.precompile import _collect as collect
from dsv4_kernels.precompile import pack
from dsv4_testkit.plans import SMALL

TARGETS = (("sm_121", "48"), ("sm_90", "132"))
_WITH_MEMORY = """
import sys
import torch
from dsv4_kernels import arch, precompile

target = arch.TargetGPU(arch.Arch(sys.argv[1]), int(sys.argv[2]))
precompile.launch_nothing(target)
# Tensors with memory, for the same GPU.
precompile.compile_for(target, "cpu")
for one in sys.stdin.read().split("\\n"):
    precompile.make_plan(one, torch.device("cpu")).warmup()
"""


def environment(cache: Path) -> dict[str, str]:
    here = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return here | {"TRITON_CACHE_DIR": str(cache)}


def precompile(cache: Path, *arguments: str, asked: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "dsv4_kernels.precompile", *arguments]
    done = subprocess.run(
        command, input=asked, env=environment(cache), capture_output=True, text=True, timeout=1200, check=True
    )
    return [json.loads(one) for one in done.stdout.splitlines()]


def kernels(cache: Path) -> set[str]:
    return {found.parent.name for found in cache.glob("*/*.cubin")}


@pytest.mark.parametrize(("target", "processes"), [(TARGETS[0], "2"), (TARGETS[1], "16")], ids=["whole", "in shares"])
def test_another_process_finds_all_of_it(tmp_path: Path, target: tuple[str, str], processes: str) -> None:
    told = precompile(tmp_path, *target, "--processes", processes, asked="\n".join([*SMALL, SMALL[0], "", ""]))
    assert [one["error"] for one in told] == [None] * len(SMALL), "each is compiled once"
    compiled = kernels(tmp_path)
    # Plans of one process may share a kernel.
    assert 0 < len(compiled) <= sum(int(str(one["kernels"])) for one in told)
    # Tensors with memory need the same kernels as those on "meta".
    command = [sys.executable, "-c", _WITH_MEMORY, *target]
    subprocess.run(command, input="\n".join(SMALL), env=environment(tmp_path), text=True, timeout=1200, check=True)
    assert kernels(tmp_path) == compiled


def test_a_plan_is_reported_once_whichever_threads_end_its_shares(capsys: pytest.CaptureFixture[str]) -> None:
    """The thread of the pool, and for a share that has ended when its callback is added the main one."""

    class Slow(list[dict[str, object]]):
        def append(self, share: dict[str, object]) -> None:
            super().append(share)
            time.sleep(0.1)

    share: Future[dict[str, object]] = Future()
    share.set_result({"plan": "p", "kernels": 1, "seconds": 0.1, "error": "TypeError: x"})
    found = Slow()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(collect, found, 2, TargetGPU(Arch.SM_90, 132), share)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["kernels"] == 2


_WITH_LAUNCHERS = """
import sys
import torch
from triton.backends.nvidia import driver
from dsv4_kernels import arch, precompile

made = []
driver.make_launcher, driver.CudaLauncher = None, lambda src, metadata: made.append((src.fn.__name__, metadata.hash))
precompile.launch_nothing(arch.TargetGPU(arch.Arch.SM_90, 132))
for share in 0, 0, 1:
    print(precompile.compile_plan(sys.argv[1], share, 2)["kernels"], len(set(made)), len(made))
"""


def test_a_triton_that_compiles_launchers_has_each_compiled_once(tmp_path: Path) -> None:
    plan = next(one for one in SMALL if "DecodePlan" in one)
    done = subprocess.run(
        [sys.executable, "-c", _WITH_LAUNCHERS, plan],
        env=environment(tmp_path), capture_output=True, text=True, timeout=1200, check=True,
    )  # fmt: skip
    first, again, other = ([int(number) for number in line.split()] for line in done.stdout.splitlines())
    # A kernel of the other share has no launcher here, and a repeated launch adds no second one.
    assert first[1:] == [first[0], first[0]]
    assert again[1:] == first[1:]
    assert other[1:] == [len(kernels(tmp_path))] * 2 != first[1:]


def test_a_plan_that_fails_is_reported_and_the_others_are_compiled(tmp_path: Path) -> None:
    odd = json.dumps({"plan": "dsv4_kernels.fp8.api:QuantPlan", "args": [64, 100, "device"], "options": {}})
    gone = json.dumps({"plan": "dsv4_kernels.fp8.api:NoPlan", "args": [], "options": {}})
    told = precompile(tmp_path, *TARGETS[0], asked="\n".join([odd, gone, "{", SMALL[0], "", ""]))
    errors = sorted(str(one["error"]).partition(":")[0] for one in told)
    assert errors == ["AttributeError", "JSONDecodeError", "None", "ValueError"]


_IMPATIENT = """
import sys
from dsv4_kernels import precompile

def impatient(lines):
    # Waits only a second for the lines after the second one.
    for one in lines:
        yield one
        precompile._IDLE_SECONDS = 1

sys.stdin = impatient(sys.stdin)
precompile.main(sys.argv[1:])
"""


@pytest.mark.parametrize("silent", [False, True])
def test_the_compile_process_ends_with_its_parent(tmp_path: Path, silent: bool) -> None:
    program = ["-c", _IMPATIENT] if silent else ["-m", "dsv4_kernels.precompile"]
    command = [sys.executable, *program, *TARGETS[0], "--processes", "2"]
    with subprocess.Popen(command, env=environment(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{SMALL[0]}\n".encode())
        process.stdin.flush()
        assert process.stdout.readline()
        compilers = psutil.Process(process.pid).children(recursive=True)
        assert compilers
        if silent:
            process.stdin.write(f"{SMALL[0]}\n".encode())
            process.stdin.flush()
        else:
            process.stdin.close()
        assert process.wait(timeout=600) == (-signal.SIGALRM if silent else 1)
    _, alive = psutil.wait_procs(compilers, timeout=60)
    assert not alive


_COMPILE = """
import json, sys
import torch, triton
from dsv4_kernels import arch, precompile

found = []
triton.knobs.compilation.listener = lambda *, cache_hit, metadata, **_: found.append([metadata["hash"], cache_hit])
target = arch.TargetGPU(arch.Arch.SM_121, 48)
precompile.launch_nothing(target)
*lines, last = sys.stdin.read().split("\\n")
if last:
    precompile.use_shipped(target.arch)
for one in lines:
    precompile.make_plan(one, torch.device("meta")).warmup()
print(json.dumps(found))
"""
FAST = (SMALL[0], SMALL[6], SMALL[7])


def compiled(lines: Sequence[str], cache: Path, *, shipped: Path | None = None, **variables: str) -> dict[str, bool]:
    """Return the keys of the kernels of `lines`, and whether each was in the cache, attached if `shipped`."""
    more = {"DSV4_KERNELS_SHIPPED": "" if shipped is None else str(shipped)} | variables
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], input="\n".join([*lines, "shipped" if shipped else ""]),
        env=environment(cache) | more, cwd=cache.parent, capture_output=True, text=True, timeout=1200, check=True,
    )  # fmt: skip
    return {str(key): bool(hit) for key, hit in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a directory of shipped kernels and the cache that they were in, which is gone."""
    folder = tmp_path_factory.mktemp("shipped")
    precompile(folder / "cache", *TARGETS[0], "--processes", "2", asked="\n".join([*FAST, "", ""]))
    pack([folder / "cache"], folder / "shipped", Arch.SM_121)
    (folder / "cache").rename(folder / "moved")
    return folder / "shipped", folder / "moved"


def test_shipped_kernels_are_found_by_another_user_in_another_place(packed: tuple[Path, Path], tmp_path: Path) -> None:
    shipped, moved = packed
    # A copy or a move of Triton's own cache is of no use: Triton compiles all of it again.
    assert not any(compiled(FAST[:1], moved).values())
    cache, programs = tmp_path / "cache", tmp_path / "programs"
    programs.mkdir()
    if found := shutil.which("file"):
        # Python takes the kind of its executable from it, which is part of the launchers' keys.
        (programs / "file").symlink_to(found)
    keys = compiled(
        FAST[::-1], cache, shipped=shipped, HOME=str(tmp_path), USER="other", PYTHONHASHSEED="7", TZ="Asia/Tokyo",
        PATH=str(programs),
    )  # fmt: skip
    assert keys
    assert all(keys.values())
    assert kernels(cache) == set()
    assert len(kernels(shipped / "sm_121")) == len(keys)
    (module,) = cache.glob("*/*.so")
    assert module.resolve().is_relative_to(shipped.resolve())
    # The directory is gone with its image: everything is compiled into the user's cache.
    shipped.rename(tmp_path / "gone")
    try:
        again = compiled(FAST, cache)
    finally:
        (tmp_path / "gone").rename(shipped)
    assert again.keys() == keys.keys()
    assert not any(again.values())
    # The image is back; complete entries of the cache stay.
    assert all(compiled(FAST, cache, shipped=shipped).values())
    assert len(kernels(cache)) == len(keys)


def test_the_shipped_folder_depends_on_the_kernels_alone(packed: tuple[Path, Path], tmp_path: Path) -> None:
    first, again = packed[0], tmp_path / "elsewhere"
    compile_into = [*TARGETS[0], "--processes", "1"]
    precompile(tmp_path / "cache", *compile_into, asked="\n".join([*FAST[::-1], "", ""]))
    pack([tmp_path / "cache"], again, Arch.SM_121)

    def content(folder: Path) -> dict[str, object]:
        manifest = json.loads((folder / "sm_121" / "manifest.json").read_text())
        # The compiler writes the path of its temporary file into a module.
        manifest["sha256"] = {name: one for name, one in manifest["sha256"].items() if not name.endswith(".so")}
        files = (one for one in folder.rglob("*") if one.is_file() and one.name != "manifest.json")
        found = {str(one.relative_to(folder)): b"" if one.suffix == ".so" else one.read_bytes() for one in files}
        return {**found, "manifest": manifest}

    assert content(again) == content(first)
    with pytest.raises(shipping.ShippedError, match="no compiled kernels for sm_90"):
        pack([tmp_path / "cache"], again, Arch.SM_90)
    assert [one.name for one in again.iterdir()] == ["sm_121"]
    assert shipping.attach(again, Arch.SM_90) is None


@pytest.mark.parametrize("changed", ["triton", "ptxas", "python", "flags", "kernels", "vllm", "arch", "platform"])
def test_kernels_of_another_environment_are_refused_by_its_name(
    packed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    changed: str,
) -> None:  # fmt: skip
    shipped = tmp_path / "shipped"
    shutil.copytree(packed[0], shipped)
    manifest = json.loads((shipped / "sm_121" / "manifest.json").read_text())
    manifest["environment"][changed] = "other"
    (shipped / "sm_121" / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setenv("DSV4_KERNELS_SHIPPED", str(shipped))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shipping, "LOGGER", logging.getLogger(__name__))
    assert shipping.use_shipped(Arch.SM_121) == 0
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"{changed} is 'other', here it is" in said
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["removed", "shortened", "zeros", "manifest", "field"])
def test_damaged_shipped_kernels_are_refused(
    packed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    shutil.copytree(packed[0], tmp_path / "shipped")
    folder = tmp_path / "shipped" / "sm_121"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    cubin = next(folder.glob("*/*.cubin"))
    if damage == "removed":
        cubin.unlink()
    elif damage == "shortened":
        cubin.write_bytes(cubin.read_bytes()[:-1])
    elif damage == "zeros":
        cubin.write_bytes(bytes(cubin.stat().st_size))
    elif damage == "manifest":
        (folder / "manifest.json").write_text("{")
    else:
        (folder / "manifest.json").write_text("{}")
    named = "manifest" if damage in ("manifest", "field") else cubin.name
    with pytest.raises(shipping.ShippedError, match=named):
        shipping.attach(tmp_path / "shipped", Arch.SM_121)
    assert not (tmp_path / "cache").exists()


def test_kernels_beside_the_remains_of_an_interrupted_attach_are_packed(
    packed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended between writing a group and renaming it."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    count = shipping.attach(packed[0], Arch.SM_121)
    groups = list(cache.glob("*/__grp__*"))
    assert len(groups) == count
    for group in groups:
        for number in range(3):
            group.with_name(f"{group.name}.{number:032x}").write_text("{")
    manifest = pack([cache], tmp_path / "again", Arch.SM_121)
    assert len(manifest["kernels"]) == count


def test_folders_of_killed_writers_are_removed_after_a_day(
    packed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Younger ones may be of a writer on another machine."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    shipping.attach(packed[0], Arch.SM_121)
    again = tmp_path / "again"
    for name, hours in ((".sm_121.1", 25), (".sm_121.1.old", 25), (".sm_121.2", 1), (".sm_90.1", 25)):
        (again / name / "key").mkdir(parents=True)
        os.utime(again / name, (time.time() - hours * 3600,) * 2)
    pack([tmp_path / "cache"], again, Arch.SM_121)
    assert sorted(one.name for one in again.iterdir()) == [".sm_121.2", ".sm_90.1", "sm_121"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    """At no time is there none, if the file system can exchange folders."""
    target, gaps = tmp_path / "sm_121", list[Path]()
    rename = Path.rename

    def noting_rename(source: Path, to: Path) -> Path:
        renamed = rename(source, to)
        if not target.exists():
            gaps.append(to)
        return renamed

    if not exchanges:
        monkeypatch.setattr(shipping, "_exchange", lambda *_: False)
    for number in range(3):
        written = tmp_path / f".sm_121.{number}"
        written.mkdir()
        (written / "content").write_text(str(number))
        shipping._replace_folder(target, written)
        assert (target / "content").read_text() == str(number)
        # `pack` removes what is there.
        assert [one.name for one in tmp_path.iterdir() if one not in (target, written)] == []
        shutil.rmtree(written, ignore_errors=True)
        monkeypatch.setattr(Path, "rename", noting_rename)
    assert bool(gaps) != exchanges


def test_several_writers_of_one_directory_leave_one_whole_result(
    packed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that build for machines with a common file system."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    count = shipping.attach(packed[0], Arch.SM_121)
    again = tmp_path / "again"
    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda _: pack([tmp_path / "cache"], again, Arch.SM_121), range(60)))
    assert {len(manifest["kernels"]) for manifest in written} == {count}
    assert [one.name for one in again.iterdir()] == ["sm_121"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert shipping.attach(again, Arch.SM_121) == count
