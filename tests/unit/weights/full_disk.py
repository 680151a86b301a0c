"""Stages onto a separate disk that is full until later; runs in a mount namespace and prints the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dsv4_runtime.contract import WeightsPlan
from dsv4_runtime.weights import staging
from dsv4_runtime.weights.checkpoint import WeightsError
from dsv4_runtime.weights.members import StagingJob
from dsv4_testkit.weights_servers import same_files


def main() -> None:
    plan, source = WeightsPlan.model_validate_json(sys.argv[1]), Path(sys.argv[2])
    folder = Path(plan.path)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "d4-small", str(folder)], check=True)
    # Another program uses the space after the check.
    other = folder / "other"
    other.write_bytes(bytes(14 << 20))
    staging.check_free_space = lambda *_: None
    job = StagingJob(weights=plan, rank=0)
    found: dict[str, object] = {}
    try:
        staging.stage(job, lambda _: None)
    except WeightsError as error:
        found = {"message": str(error), "cause": error.cause}
    found["kept"] = sum(path.stat().st_size for path in folder.glob("*.safetensors*"))
    other.unlink()
    found["fetched"] = staging.stage(job, lambda _: None).fetched
    found["same"] = same_files(source, folder)
    print(json.dumps(found))


main()
