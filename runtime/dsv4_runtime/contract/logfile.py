"""The log of a process that writes it itself, and keeps it small."""

from __future__ import annotations

import logging
import os
import sys
import time
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_BYTES = 32 << 20
"""Of a log; as much again is kept of what came before it, as `<name>.1`."""


class _Bounded(RotatingFileHandler):
    """Takes standard output and error along: what ends a process is not said through `logging`."""

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        for inherited in (sys.stdout, sys.stderr):
            inherited.flush()
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
        return stream


def log_to(file: Path | None, form: str = "%(asctime)s %(message)s", limit: int = LOG_BYTES) -> None:
    """Log what this process says to `file`, in UTC; None: to standard error, of which others take care.

    Args:
        file: appended to; moved to `<name>.1` at `limit` bytes, over the one that was there.
        form: of a line, as `logging.Formatter` has it.
        limit: bytes.

    Raises:
        OSError: the file cannot be written.
    """
    logging.Formatter.converter = time.gmtime
    handler = (
        logging.StreamHandler(sys.stderr)
        if file is None
        else _Bounded(file, maxBytes=limit, backupCount=1, encoding="utf-8", errors="backslashreplace")
    )
    logging.basicConfig(level=logging.INFO, format=form, handlers=[handler], force=True)
