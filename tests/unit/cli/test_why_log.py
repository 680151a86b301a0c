"""`dsv4 why --log`: cause of a failure from the log of any run of vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.api.spec import DeploymentSpec
from dsv4_operator.cli import diagnostics, main
from dsv4_runtime.contract import Cause
from dsv4_runtime.engine.signatures import REMEDIES, SIGNATURES

PAGES = Path(__file__).parents[3] / "docs"
CORE = "(EngineCore pid=222) ERROR 08-22 09:01:01 [core.py:1165] "


def log(folder: Path, *lines: str, name: str = "vllm.log") -> str:
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)


def test_a_log_gives_cause_evidence_remedy_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = log(
        tmp_path,
        "started",
        f"{CORE}EngineCore failed to start.",
        f"{CORE}ValueError: No available memory for the cache blocks.",
    )
    assert main.run(["why", "--log", file]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "cause      KVCacheTooSmall (a restart does not help)"
    assert f"evidence   {file}:3: ValueError: No available memory" in text
    assert text.splitlines()[-1] == "page       docs/failures/kv-cache-too-small.md"
    assert main.run(["why", "--log", file, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cause"] == "KVCacheTooSmall"
    assert document["deterministic"] is True
    assert document["remedy"] == REMEDIES[Cause.KV_CACHE_TOO_SMALL]
    assert document["evidence"][0]["line"] == f"{file}:3"


def test_several_logs_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = log(tmp_path, f"{CORE}ray.exceptions.ActorDiedError: The actor died unexpectedly.", name="head.log")
    second = log(tmp_path, "x", "torch.OutOfMemoryError: CUDA out of memory.", name="worker.log")
    assert main.run(["why", "--log", first, "--log", second, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["cause"], document["evidence"][0]["line"]) == ("OutOfMemoryGPU", f"{second}:2")


def test_an_error_without_a_known_cause_keeps_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (f"{CORE}EngineCore encountered a fatal error.", f"{CORE}Traceback (most recent call last):")
    assert main.run(["why", "--log", log(tmp_path, *lines, f"{CORE}ValueError: an assertion"), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["cause"], document["message"]) == ("EngineCoreDied", "ValueError: an assertion")
    assert main.run(["why", "--log", log(tmp_path, "RuntimeError: of another program"), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] == "Unknown"


def test_a_log_without_an_error_and_a_file_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["why", "--log", log(tmp_path, "INFO started")]) == 1
    assert capsys.readouterr().out == "no error in the log\n"
    assert main.run(["why", "--log", str(tmp_path / "none")]) == 2
    assert f"--log: {tmp_path}/none cannot be read: No such file or directory" in capsys.readouterr().err
    assert main.run(["why", "nano", "--log", str(tmp_path / "none")]) == 2
    assert "leave the name out" in capsys.readouterr().err


def test_logs_with_carriage_returns_and_colours_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (f"\x1b[36m{CORE}EngineCore failed to start.\x1b[0m", f"{CORE}torch.OutOfMemoryError: CUDA out of memory.")
    (tmp_path / "vllm.log").write_bytes("\r\n".join(lines).encode())
    assert main.run(["why", "--log", str(tmp_path / "vllm.log"), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["cause"], document["evidence"][0]["line"]) == ("OutOfMemoryGPU", f"{tmp_path}/vllm.log:2")


def test_bytes_that_are_no_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_bytes(b"\xff\xfe\x00 CUDA out of memory\n")
    assert main.run(["why", "--log", str(tmp_path / "vllm.log")]) == 0


def test_of_a_long_log_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnostics, "_MOST_LOG_BYTES", 100)
    file = log(tmp_path, "MemoryError", *["x" * 50] * 9, f"{CORE}EngineCore failed to start.")
    assert main.run(["why", "--log", file, "-o", "json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["cause"] == "EngineCoreDied"
    assert "only the last 64 MiB" in found.err


@pytest.mark.parametrize("cause", sorted({row.cause for row in SIGNATURES if row.cause} | {Cause.ENGINE_CORE_DIED}))
def test_each_cause_has_a_remedy_and_a_page(cause: Cause) -> None:
    assert REMEDIES[cause]
    assert (PAGES / "failures" / f"{diagnostics._kebab(cause)}.md").is_file()


def test_remedies_differ_and_name_fields_of_the_specification() -> None:
    assert len(set(REMEDIES.values())) == len(REMEDIES)
    named = set()
    for text in (*REMEDIES.values(), *(row.remedy for row in SIGNATURES)):
        for path in re.findall(r"\bspec((?:\.[a-zA-Z]+)+)", text):
            part: Any = DeploymentSpec
            for name in path[1:].split("."):
                fields = {field.alias or key: field.annotation for key, field in part.model_fields.items()}
                assert name in fields, f"spec{path}"
                part = fields[name]
            named.add(path)
    assert len(named) >= 8, "fields of causes that a restart does not change"


@pytest.mark.parametrize("cause", [cause for cause in REMEDIES if cause.deterministic])
def test_a_cause_that_a_restart_does_not_change_names_its_field(cause: Cause) -> None:
    assert "spec." in REMEDIES[cause]
