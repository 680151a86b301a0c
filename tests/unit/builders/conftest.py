"""Nodes and pods as in the tests of the backend."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "pods"))
