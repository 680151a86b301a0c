"""What pip must keep to in `runtime/Dockerfile`: `python3 constraints.py requirements.txt > constraints.txt`.

Packages that the image already has stay in the version that its vLLM was built and tested with; the others come in the
version with which dsv4 is tested.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9._-]+)==")


def normal(name: str) -> str:
    """The one spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(installed: dict[str, str], requirements: str) -> list[str]:
    """Lines for `pip install --constraint`.

    Args:
        installed: version of each distribution, by its normal name.
        requirements: text of a pinned requirements file; its markers are kept.
    """
    pins = [
        line for line in requirements.splitlines() if (match := PIN.match(line)) and normal(match[1]) not in installed
    ]
    # A version with a local part, 2.14.0+cu130, is matched only by itself.
    return [f"{name}=={version}" for name, version in sorted(installed.items())] + pins


if __name__ == "__main__":
    there = {normal(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()}
    print("\n".join(constraints(there, Path(sys.argv[1]).read_text())))
