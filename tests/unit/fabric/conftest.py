from __future__ import annotations

import sys
from pathlib import Path

# The machines' builder lies beside the tests; with importlib import mode nothing else puts it on the path.
sys.path.insert(0, str(Path(__file__).parent))
