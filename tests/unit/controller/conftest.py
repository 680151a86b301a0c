"""The API server in memory lies beside the tests of `kube`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kube"))
