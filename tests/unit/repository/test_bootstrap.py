"""Setup of a machine without the needed packages."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = """#!/bin/sh
# A Python without what `lacks` matches until apt-get has run; Debian's own has no venv.
case "$*" in
  {lacks}) test -e "{log}" ;;
  "-m venv .uv") mkdir -p .uv/bin && printf '#!/bin/sh\\n' > .uv/bin/python && chmod 755 .uv/bin/python ;;
esac
"""


VENV = '*"import ensurepip, venv"*'


def bootstrap(
    place: Path, *, user: int, lacks: str = VENV, terminal: int | None = None, **environment: str
) -> tuple[int, str, str]:
    """Run `.ci/bootstrap` in `place` with an apt-get that only records its arguments.

    Returns:
        Exit code, standard error (empty with a terminal), and the arguments.
    """
    programs, log = place / "bin", place / "apt"
    programs.mkdir()
    scripts = {
        "apt-get": f'#!/bin/sh\necho "$@" >> {log}\n',
        "id": f"#!/bin/sh\necho {user}\n",
        "ip": "#!/bin/sh\n",
        "bare-python": PYTHON.format(log=log, lacks=lacks),
    }
    for name, text in scripts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / ".ci" / "bootstrap"],
        cwd=place,
        env={"PATH": f"{programs}:{os.defpath}", "PYTHON": "bare-python", "UV_VERSION": "1", **environment},
        stdin=subprocess.DEVNULL if terminal is None else terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if terminal is None else terminal,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr or "", log.read_text() if log.exists() else ""


def read_all(master: int) -> str:
    """Return the text of a terminal that has no writers left."""
    shown = b""
    # The kernel reports the end of the file as EIO.
    with contextlib.suppress(OSError):
        while part := os.read(master, 4096):
            shown += part
    return shown.decode()


def test_root_without_a_terminal_gets_the_packages(tmp_path: Path) -> None:
    code, said, asked = bootstrap(tmp_path, user=0)
    assert (code, said) == (0, "dsv4: installing packages: python3-venv\n")
    assert asked.splitlines() == ["-qq update", "-qq install -y --no-install-recommends python3-venv"]


@pytest.mark.parametrize(("user", "variables"), [(0, {"INSTALL": "0"}), (1000, {}), (1000, {"INSTALL": "1"})])
def test_otherwise_one_sentence_has_the_remedy(tmp_path: Path, user: int, variables: dict[str, str]) -> None:
    code, said, asked = bootstrap(tmp_path, user=user, **variables)
    assert code == 1
    assert said == "dsv4: missing packages: python3-venv; run as root: apt-get install python3-venv\n"
    assert asked == ""


@pytest.mark.parametrize(
    ("answer", "variables", "installed"),
    [
        ("\n", {}, True),
        ("y\n", {}, True),
        ("n\n", {}, False),
        ("No\n", {}, False),
        (None, {"INSTALL": "1"}, True),
        (None, {"INSTALL": "0"}, False),
        (None, {"CI": "true"}, True),
    ],
)
def test_installation_is_confirmed_at_a_terminal(
    tmp_path: Path, answer: str | None, variables: dict[str, str], installed: bool
) -> None:
    master, terminal = os.openpty()
    try:
        if answer:
            os.write(master, answer.encode())
        try:
            code, _, asked = bootstrap(tmp_path, user=0, terminal=terminal, **variables)
        finally:
            os.close(terminal)
        shown = read_all(master)
    finally:
        os.close(master)
    assert (code == 0, bool(asked)) == (installed, installed)
    assert ("Install them with apt-get? [Y/n]" in shown) is (answer is not None)
    assert ("run as root: apt-get install python3-venv" in shown) is not installed


@pytest.mark.parametrize(
    ("lacks", "package"),
    [("*ensurepip*", "python3-venv"), ("*Python.h*", "python3-dev"), ("*libnuma.so.1*", "libnuma1")],
)
def test_each_requirement_of_an_engine_is_checked(tmp_path: Path, lacks: str, package: str) -> None:
    code, said, _ = bootstrap(tmp_path, user=0, lacks=lacks, INSTALL="0")
    assert (code, said.endswith(f"apt-get install {package}\n")) == (1, True), said


def test_all_missing_packages_are_in_one_line(tmp_path: Path) -> None:
    code, said, _ = bootstrap(
        tmp_path, user=0, INSTALL="0", lacks="*ensurepip*|*Python.h*|*libnuma*", CXX="no-such-compiler"
    )
    assert (code, said.count("\n")) == (1, 1)
    assert said.endswith("apt-get install python3-venv python3-dev libnuma1 g++\n")


def test_a_machine_without_python_gets_it_with_its_parts(tmp_path: Path) -> None:
    code, said, _ = bootstrap(tmp_path, user=0, INSTALL="0", PYTHON="no-such-python", CXX="no-such-compiler")
    assert code == 1
    assert said.endswith("apt-get install python3 python3-venv python3-dev libnuma1 g++\n")
