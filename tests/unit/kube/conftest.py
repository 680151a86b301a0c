"""The API server in memory lies beside the tests; with importlib import mode nothing else puts it on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
