from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
        return subprocess.run(command, stdout=log, stderr=log, text=True, timeout=60, check=False)


def test_a_log_stays_small_and_ends_with_what_ended_its_process(tmp_path: Path) -> None:
    file = tmp_path / "loop.log"
    for _ in range(2):
        assert run(file).returncode == 1
        text, before = file.read_text(), file.with_name("loop.log.1").read_text()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["loop.log", "loop.log.1"]
        assert len(before) <= LIMIT
        assert len(text) < LIMIT + 1024  # a traceback is no line of the log, and ends it
        assert "said on standard output\n" in text
        assert text.endswith("SystemError: what ends a process\n")
        numbers = [int(number) for number in re.findall(r",\d{3} line (\d+)", before + text)]
        assert numbers[-100:] == list(range(200, 300))


def test_lines_have_their_time_in_utc(tmp_path: Path) -> None:
    file = tmp_path / "loop.log"
    run(file)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} line \d+\n", file.read_text())
