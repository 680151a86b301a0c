"""What `make` does about a machine that lacks something: it says so, and changes the machine only when asked to."""

from __future__ import annotations

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


def bootstrap(place: Path, *, user: int, lacks: str = VENV, **environment: str) -> tuple[int, str, str]:
    """Run `.ci/bootstrap` in `place`, whose apt-get only notes what it is asked for; code, words, what was asked."""
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
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stderr, log.read_text() if log.exists() else ""


def test_root_is_told_what_would_be_installed_and_nothing_is(tmp_path: Path) -> None:
    code, said, asked = bootstrap(tmp_path, user=0)
    assert code == 1
    how = "INSTALL=1 after make has them installed: apt-get install python3-venv"
    assert said == f"dsv4: this machine lacks: python3-venv. {how}\n"
    assert asked == ""


@pytest.mark.parametrize("variable", [{"INSTALL": "1"}, {"CI": "true"}])
def test_what_is_missing_is_installed_where_that_was_asked_for(tmp_path: Path, variable: dict[str, str]) -> None:
    code, said, asked = bootstrap(tmp_path, user=0, **variable)
    assert (code, said) == (0, "dsv4: installing from Debian: python3-venv\n")
    assert asked.splitlines() == ["-qq update", "-qq install -y python3-venv"]


def test_who_is_not_root_is_told_too(tmp_path: Path) -> None:
    code, said, asked = bootstrap(tmp_path, user=1000, INSTALL="1")
    assert code == 1
    assert said.startswith("dsv4: this machine lacks: python3-venv. Install them (as root: ")
    assert asked == ""


@pytest.mark.parametrize(
    ("lacks", "package"),
    [("*ensurepip*", "python3-venv"), ("*Python.h*", "python3-dev"), ("*libnuma.so.1*", "libnuma1")],
)
def test_each_thing_that_an_engine_needs_is_looked_for(tmp_path: Path, lacks: str, package: str) -> None:
    code, said, _ = bootstrap(tmp_path, user=0, lacks=lacks)
    assert (code, said.endswith(f"apt-get install {package}\n")) == (1, True), said


def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    code, said, _ = bootstrap(tmp_path, user=0, lacks="*ensurepip*|*Python.h*|*libnuma*", CXX="no-such-compiler")
    assert (code, said.count("\n")) == (1, 1)
    assert said.endswith("apt-get install python3-venv python3-dev libnuma1 g++\n")


def test_a_machine_without_python_is_told_all_that_goes_with_it(tmp_path: Path) -> None:
    code, said, _ = bootstrap(tmp_path, user=0, PYTHON="no-such-python", CXX="no-such-compiler")
    assert code == 1
    assert said.endswith("apt-get install python3 python3-venv python3-dev libnuma1 g++\n")
