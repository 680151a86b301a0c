"""Choice of the CUDA toolkit for an engine, and errors that name parts that are missing to compile kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_operator.backends.local import software
from dsv4_operator.backends.local.software import check_compilers, cuda_home
from dsv4_operator.backends.local.state import StateError

CUDA = (13, 0)


def made(home: Path, release: str, headers: str = "", *, folder: str = "lib64") -> Path:
    """Create a toolkit whose nvcc reports `release`, optionally with headers of another release."""
    for name in ("bin", "include", "nvvm", folder):
        (home / name).mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    major, minor = (headers or release).split(".")
    version = int(major) * 1000 + int(minor) * 10
    (home / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    (home / folder / "libcudart.so.13").write_bytes(b"runtime")
    (home / folder / "libcudart_static.a").write_bytes(b"archive")
    return home


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine without a toolkit: neither on PATH, nor NVIDIA's default, nor among Python packages."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(software, "_SYSTEM", tmp_path / "system")
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    monkeypatch.delitem(software.importlib.util.sys.modules, "nvidia", raising=False)
    yield tmp_path
    monkeypatch.delitem(software.importlib.util.sys.modules, "nvidia", raising=False)


def home_of(bare: Path, *, needed: bool = True, **named: str) -> Path | None:
    return cuda_home(CUDA, bare / "links", named, needed=needed)


def test_the_users_toolkit_has_precedence(bare: Path) -> None:
    made(bare / "system", "13.0")
    own = made(bare / "own", "13.1")
    assert home_of(bare, CUDA_HOME=str(own)) == own
    assert home_of(bare, CUDA_PATH=str(own)) == own


@pytest.mark.parametrize(
    ("release", "what"), [("12.8", "is of CUDA 12.8"), ("14.0", "is of CUDA 14.0"), (None, "it has no bin/nvcc")]
)
def test_the_users_own_must_fit(bare: Path, release: str | None, what: str) -> None:
    own = bare / "own"
    if release is not None:
        made(own, release)
    with pytest.raises(StateError, match=rf"CUDA_HOME is {own}, and .*{what}; name a toolkit of CUDA 13, or unset it"):
        home_of(bare, needed=False, CUDA_HOME=str(own))


def test_the_toolkit_in_path_precedes_that_of_nvidia(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, other = made(bare / "system", "13.0"), made(bare / "other", "13.2")
    assert home_of(bare) == system
    # Installers create a link in a directory outside the toolkit.
    (bare / "bin").mkdir()
    (bare / "bin" / "nvcc").symlink_to(other / "bin" / "nvcc")
    assert home_of(bare) == other
    # Debian's own toolkit is years older than torch's.
    (other / "bin" / "nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.0, V12.0.140'\n")
    assert home_of(bare) == system


def test_that_of_the_packages_is_laid_out_as_nvidias(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = bare / "libcuda.so.1"
    monkeypatch.setattr(software, "_driver", lambda: [driver])
    packages = made(bare / "site" / "nvidia" / "cu13", "13.0", folder="lib")
    home = home_of(bare)
    assert home == bare / "links"
    assert (home / "bin" / "nvcc").samefile(packages / "bin" / "nvcc")
    names = {path.name: path.readlink() for path in (home / "lib64").iterdir() if path.is_symlink()}
    runtime = packages / "lib" / "libcudart.so.13"
    assert names == {
        "libcudart.so": runtime,
        "libcudart.so.13": runtime,
        "libcudart_static.a": packages / "lib" / "libcudart_static.a",
    }
    assert (home / "lib64" / "stubs" / "libcuda.so").readlink() == driver
    # Repeated after the environment was created again elsewhere.
    packages.parent.rename(bare / "site" / "old")
    again = made(bare / "site" / "nvidia" / "cu13", "13.0", folder="lib")
    assert home_of(bare) == home
    assert (home / "include").samefile(again / "include")
    assert not list(home.rglob(".*")), "nothing half made is left"


def test_packages_of_several_releases_are_no_toolkit(bare: Path) -> None:
    """pip resolves vLLM's requirements to nvcc of one release and the runtime's headers of torch's release."""
    made(bare / "site" / "nvidia" / "cu13", "13.5", "13.0", folder="lib")
    assert home_of(bare, needed=False) is None
    with pytest.raises(StateError, match=r"is of CUDA 13\.5 and the headers beside it of 13\.0\); `make gpu-setup`"):
        home_of(bare)


def test_a_missing_toolkit_is_an_error_if_it_is_needed(bare: Path) -> None:
    assert home_of(bare, needed=False) is None
    with pytest.raises(StateError, match=r"there is none of CUDA 13; `make gpu-setup` .* and set CUDA_HOME"):
        home_of(bare)


def test_a_toolkit_that_does_not_answer_is_none(bare: Path) -> None:
    home = made(bare / "system", "13.0")
    (home / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert home_of(bare, needed=False) is None


def test_missing_host_compilers_are_named_with_their_packages(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(software.sysconfig, "get_python_version", lambda: "3.12")
    monkeypatch.setattr(software.sysconfig, "get_paths", lambda scheme: {"include": str(bare / "headers")})
    with pytest.raises(
        StateError, match=r"gcc\) and .*Python\.h of Python 3\.12 .*install gcc g\+\+ python3\.12-dev\)$"
    ):
        check_compilers(cpu=False)
    (bare / "bin").mkdir()
    for name in ("clang", "g++"):
        (bare / "bin" / name).touch(0o755)
    with pytest.raises(StateError, match=r"and Python\.h of Python 3\.12 cannot be found"):
        check_compilers(cpu=False)
    (bare / "headers").mkdir()
    (bare / "headers" / "Python.h").touch()
    check_compilers(cpu=False)
    monkeypatch.setattr(software.ctypes, "CDLL", lambda name: open(bare / name, "rb"))  # noqa: SIM115
    with pytest.raises(StateError, match=r"and libnuma\.so\.1 cannot be found; .*apt-get install libnuma1\)"):
        check_compilers(cpu=True)
    # Triton uses the compiler that the user names.
    monkeypatch.setenv("CC", str(bare / "bin" / "icx"))
    with pytest.raises(StateError, match=r"a C compiler \(gcc\) cannot be found"):
        check_compilers(cpu=False)
