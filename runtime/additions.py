"""Packages that `runtime/Dockerfile` adds to its base: `python3 additions.py requirements.txt > additions.txt`.

Packages that the base has stay as they are: its vLLM was built and tested with them. Only those that it lacks are
installed, each in the version, and with the content, that the requirements name.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Collection
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9._-]+)==")
ENTRY = re.compile(r"\n(?=\S)")


def normal(name: str) -> str:
    """Return the one spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def additions(installed: Collection[str], requirements: str) -> str:
    """Return the entries of a requirements file, with their markers and hashes, whose packages are not installed.

    Args:
        installed: normal names.
        requirements: text of a pinned requirements file.
    """
    entries = ENTRY.split(requirements.strip())
    lacking = [one for one in entries if (found := PIN.match(one)) and normal(found[1]) not in installed]
    return "".join(f"{one}\n" for one in lacking)


if __name__ == "__main__":
    there = {normal(found.metadata["Name"]) for found in importlib.metadata.distributions()}
    sys.stdout.write(additions(there, Path(sys.argv[1]).read_text()))
