"""Scripts that run inside the installed vLLM, as dsv4's development platform has it, and tell what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 120


def told_by(script: Path, **environment: str) -> dict[str, Any]:
    """Return the last line that `script` prints, a JSON object; `environment` is added to this process's.

    Raises:
        AssertionError: it ended with an error, the end of which is the message.
        subprocess.TimeoutExpired: it was not done after `SECONDS`.
    """
    env = {**os.environ, "DSV4_DEV_PLATFORM": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
