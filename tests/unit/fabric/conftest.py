from __future__ import annotations

import sys
from pathlib import Path

# Makes `machines` importable: with import mode importlib pytest adds no folder to the path.
sys.path.insert(0, str(Path(__file__).parent))
