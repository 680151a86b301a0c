from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.cli.output import log_time
from dsv4_runtime.util import LOG_FORMAT
from dsv4_runtime.util.files import LOG_FIELDS, format_logs, log_context, log_to

LIMIT = 4096
PROGRAM = """
import logging, os, pathlib, sys
from dsv4_runtime.util.files import log_to
log_to(pathlib.Path(sys.argv[1]), limit=int(sys.argv[2]))
for number in range(300):
    logging.getLogger("test").info("line %d", number)
os.write(1, b"said on standard output\\n")
raise SystemError("what ends a process")
"""


def run(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(file), str(LIMIT)]
    with file.open("ab") as log:
        return subprocess.run(command, stdout=log, stderr=log, text=True, timeout=120, check=False)


def test_a_log_stays_small_and_ends_with_the_fatal_error(tmp_path: Path) -> None:
    file = tmp_path / "loop.log"
    for _ in range(2):
        assert run(file).returncode == 1
        text, before = file.read_text(), file.with_name("loop.log.1").read_text()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["loop.log", "loop.log.1"]
        assert len(before) <= LIMIT
        assert len(text) < LIMIT + 1024  # a traceback is not a log record, so it may exceed the limit
        assert "said on standard output\n" in text
        assert text.endswith("SystemError: what ends a process\n")
        numbers = [int(number) for number in re.findall(r",\d{3} line (\d+)", before + text)]
        assert numbers[-100:] == list(range(200, 300))


def test_lines_have_their_time_in_utc(tmp_path: Path) -> None:
    file = tmp_path / "loop.log"
    run(file)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} line \d+\n", file.read_text())


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, converter = root.handlers[:], root.level, logging.Formatter.converter
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers, logging.Formatter.converter = handlers, converter
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_json_lines_have_every_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log"
    monkeypatch.setenv(LOG_FORMAT, "json")
    log_to(file)
    format_logs(None, lambda: {"deployment": "nano", "generation": 3, "rank": 1})
    log = logging.getLogger("dsv4.test")
    log.info("one\nline %s", "\u2028\x1b[31m")

    async def of_group(group: int) -> None:
        log_context.set({"group": group, "incarnation": 7})
        await asyncio.sleep(0)
        log.warning("group")

    async def both() -> None:
        await asyncio.gather(of_group(0), of_group(1))

    asyncio.run(both())
    log.info("engine", extra={"group": 4, "generation": 9})
    try:
        int("reason")
    except ValueError:
        log.exception("failed")
    found = lines(file.read_text())
    assert all(set(LOG_FIELDS) <= set(each) for each in found)
    assert [each["message"] for each in found] == ["one\nline \u2028\x1b[31m", "group", "group", "engine", "failed"]
    places = [(each["group"], each["incarnation"], each["generation"], each["rank"]) for each in found]
    assert places == [(None, None, 3, 1), (0, 7, 3, 1), (1, 7, 3, 1), (4, None, 9, 1), (None, None, 3, 1)]
    assert {each["deployment"] for each in found} == {"nano"}
    assert "ValueError: invalid literal" in found[-1]["exception"]
    assert found[0]["level"] == "INFO"
    now = datetime.now(UTC)
    assert all(abs((datetime.fromisoformat(each["time"]) - now).total_seconds()) < 600 for each in found)


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize(("variable", "chosen"), [("", None), ("text", None), ("json", "text"), ("xml", None)])
def test_the_log_is_text_by_default(
    variable: str, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_FORMAT, variable)
    log_to(tmp_path / "log")
    format_logs(chosen)
    logging.getLogger("dsv4.test").info("a line")
    text = (tmp_path / "log").read_text()
    assert text.splitlines()[-1].endswith(" a line")
    assert ("DSV4_LOG_FORMAT 'xml' is not text or json" in text) is (variable == "xml")


@pytest.mark.usefixtures("root_logger")
def test_json_lines_sort_with_those_of_vllm(tmp_path: Path) -> None:
    log_to(tmp_path / "log")
    format_logs("json")
    logging.getLogger("dsv4.test").info("a line")
    line = (tmp_path / "log").read_bytes()
    written = datetime.fromisoformat(json.loads(line)["time"])
    found = log_time(line, written.month)
    assert found is not None
    other = log_time(f"INFO {written:%m-%d %H:%M:%S} [a.py:1] x".encode(), written.month)
    assert other is not None
    assert (found[:14], found[-6:-4]) == (other[:14], other[-2:])
