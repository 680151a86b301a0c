from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from dsv4_operator.cli import diagnostics
from dsv4_operator.cli.main import run
from dsv4_operator.cli.output import CommandError, ExitCode
from dsv4_operator.cli.sources.base import EvidenceFile
from dsv4_operator.cli.sources.local import LocalSource

SECRETS = (
    "hf_" + "aB3" * 10,
    "AKIA" + "ABCDEFGH" * 2,
    "sk-" + "aB3" * 12,
    "https://user:pass@store.example/x",
    "-----BEGIN RSA PRIVATE KEY-----",
)
MANIFEST = json.dumps(
    {
        "apiVersion": "dsv4.dev/v1alpha1",
        "kind": "DSV4Deployment",
        "metadata": {"name": "nano"},
        "spec": {"model": {"variant": "Nano", "source": {"nano": {"seed": 0}}}, "topology": {"hardware": "CPU"}},
    }
)


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


def test_packed_evidence_is_complete_and_without_secrets(root: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("secret", SECRETS)
def test_text_in_the_format_of_a_secret_is_hidden(secret: str) -> None:
    document = {"env": [{"name": "X", "value": f"use {secret}"}], secret: 1, "kept": ["a", 2, None, True]}
    cut = json.dumps(document, indent=2)[2:]
    for name, text in (("a.json", json.dumps(document)), ("a.json", cut), ("a.log", f"one\ntwo {secret} three\nfour")):
        found = diagnostics.without_secrets(EvidenceFile(name, text.encode())).decode()
        assert secret not in found
        assert "[hidden: " in found
        assert "kept" in found or "one\n[hidden: it has the form of a secret]\nfour" in found
    hidden = json.loads(diagnostics.without_secrets(EvidenceFile("a.json", json.dumps(document).encode())))
    assert hidden["kept"] == ["a", 2, None, True]


def test_other_bytes_stay() -> None:
    data = b"\xff\xfe no secret \x00\n"
    assert diagnostics.without_secrets(EvidenceFile("a.log", data)) == data
    found = diagnostics.without_secrets(EvidenceFile("a.log", data + f"x {SECRETS[0]}\n".encode()))
    assert found.startswith(data)
    assert SECRETS[0].encode() not in found


def test_a_must_gather_archive_of_a_machine(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "nano" / "manifest.json").write_text(MANIFEST)
    (root / "nano" / "object.json").unlink()
    (root / "nano" / "i2/m0/vllm.log").write_text(f"download with {SECRETS[0]}\n")
    target = tmp_path / "gather.tar.gz"
    assert run(["report", "nano", "--must-gather", str(target), "--state-dir", str(root)]) == 0
    with tarfile.open(target) as archive:
        files = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    assert {"nano/report.html", "nano/report.json", "nano/manifest.json", "nano/evidence/1-g1-x/evidence.json"} <= set(
        files
    )
    assert json.loads(files["nano/report.json"])["phase"] == "Stopped"
    assert SECRETS[0] not in "".join(files.values())
    assert "secret-token" not in "".join(files.values())
    assert "names of hosts and addresses" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))
    assert run(["report", "nano", "--must-gather", str(tmp_path), "--state-dir", str(root)]) == 2
    assert "--must-gather" in capsys.readouterr().err


def test_a_directory_is_no_file(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is a directory; name a file in it"):
        diagnostics.pack_evidence(LocalSource(root), "nano", tmp_path)


def test_a_failed_write_leaves_nothing(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file or directory"):
        diagnostics.pack_evidence(LocalSource(root), "nano", tmp_path / "missing" / "out.tar.gz")
    assert not list(tmp_path.glob("**/*.part"))
