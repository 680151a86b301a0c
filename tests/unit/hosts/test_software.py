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
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_operator.backends.hosts import bootstrap
from dsv4_operator.backends.local.software import archive_of, installer, wheel

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
