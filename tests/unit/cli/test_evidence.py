from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from dsv4_operator.cli import diagnostics
from dsv4_operator.cli.errors import CommandError, ExitCode
from dsv4_operator.cli.sources.local import LocalSource


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "state" / "nano"
    (directory / "i2" / "m0").mkdir(parents=True)
    (directory / "evidence" / "1-g1-x").mkdir(parents=True)
    (directory / "g1/evidence/3-x").mkdir(parents=True)
    for name in ("manifest.json", "object.json", "i2/plan.json"):
        (directory / name).write_text("{}")
    (directory / "token").write_text("secret-token")
    (directory / "loop.log").write_bytes(b"a" * (1024 * 1024) + b"the end")
    (directory / "i2/m0/vllm.log").write_text("a line")
    (directory / "evidence/1-g1-x/evidence.json").write_text('{"failure": 1}')
    (directory / "g1/evidence/3-x/plan.json").write_text("{}")
    return tmp_path / "state"


def test_all_that_tells_of_deaths_is_in_it_and_no_secret(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.tar.gz"
    assert diagnostics.pack_evidence(LocalSource(root), "nano", target) is ExitCode.OK
    with tarfile.open(target) as archive:
        names = archive.getnames()
        loop = archive.extractfile("nano/loop.log")
        assert loop is not None
        data = loop.read()
    assert names == [
        "nano/manifest.json",
        "nano/object.json",
        "nano/loop.log",
        "nano/evidence/1-g1-x/evidence.json",
        "nano/i2/plan.json",
        "nano/i2/m0/vllm.log",
        "nano/g1/evidence/3-x/plan.json",
    ]
    assert len(data) == 1024 * 1024
    assert data.endswith(b"the end")


def test_a_directory_is_no_file(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is a directory; name a file in it"):
        diagnostics.pack_evidence(LocalSource(root), "nano", tmp_path)


def test_a_failed_write_leaves_nothing(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file or directory"):
        diagnostics.pack_evidence(LocalSource(root), "nano", tmp_path / "missing" / "out.tar.gz")
    assert not list(tmp_path.glob("**/*.part"))
