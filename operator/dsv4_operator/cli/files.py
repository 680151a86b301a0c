"""The file that `dsv4 up` and `dsv4 plan` are given."""

from __future__ import annotations

import sys
from pathlib import Path

from dsv4_operator.api import DSV4Deployment, InvalidDeployment, load
from dsv4_operator.cli.errors import bad_input


def read_file(file: str) -> DSV4Deployment:
    """The deployment in `file`, `-` being stdin.

    Raises:
        CommandError: with every finding on its own line.
    """
    name = "stdin" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise bad_input(f"{name}: there is no such file") from None
    except UnicodeDecodeError:
        raise bad_input(f"{name}: not a text file; a DSV4Deployment is YAML or JSON") from None
    except OSError as error:
        raise bad_input(f"{name}: {error.strerror}") from None
    try:
        return load(text)
    except InvalidDeployment as error:
        raise bad_input(*(f"{name}: {finding}" for finding in error.findings)) from None
