"""The file that `dsv4 up` and `dsv4 plan` are given."""

from __future__ import annotations

import sys
from pathlib import Path

from dsv4_operator.api import DSV4Deployment, Finding, Hardware, InvalidDeployment, load
from dsv4_operator.backends.local.gpus import hardware_here
from dsv4_operator.cli.errors import bad_input


def read_file(file: str, *, here: bool = False) -> DSV4Deployment:
    """Return the deployment in `file`, `-` being stdin.

    Args:
        file: its name.
        here: it is for this machine, so `spec.topology.hardware` is what there is where the file leaves it out.

    Raises:
        CommandError: with every finding on its own line; or the GPUs that are to be taken cannot be asked.
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
    missing: list[str] = []

    def hardware() -> str:
        try:
            found, reason = hardware_here()
        except LookupError as error:
            raise bad_input(
                f"{name}: spec.topology.hardware: is left out, and the GPUs of this machine cannot be asked: {error}; "
                f"mend that, or write hardware: {Hardware.CPU}"
            ) from None
        missing.append(reason)
        return found

    try:
        return load(text, hardware if here else None)
    except InvalidDeployment as error:
        findings = list(error.findings)
        if any(missing):
            why = f"is left out, and {Hardware.CPU} is taken, because on this machine {missing[0]}"
            findings.insert(0, Finding("spec.topology.hardware", why))
        raise bad_input(*(f"{name}: {finding}" for finding in findings)) from None
