"""`ray start` without its dependence on the dashboard: `python -m dsv4_runtime.engine.ray_start ARGUMENTS`.

`ray start --block` ends the whole node when any of its processes ends. No engine needs the dashboard, so it is started
again instead, a bounded number of times.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

_REPLACEMENTS = 5
_PAUSE_SECONDS = 10.0
"""Shortest time between two replacements."""


class Auxiliaries:
    """Replaces dead auxiliary processes of a `ray._private.node.Node`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._watch: threading.Thread | None = None

    def essential(self, node: Any) -> list[tuple[str, Any]]:
        """Return kind and process of the essential processes that have ended; watch the dashboard from the first call
        on.

        Args:
            node: the Ray node.
        """
        if self._watch is None and self._kind in node.all_processes:
            self._watch = threading.Thread(target=self._replace, args=(node,), daemon=True)
            self._watch.start()
        # A copy, because the other thread changes it.
        return [
            (kind, each.process)
            for kind, processes in list(node.all_processes.items())
            for each in processes
            if kind != self._kind and each.process.poll() is not None
        ]

    def _replace(self, node: Any) -> None:
        """Start the dashboard again at each end, without the delay of a poll."""
        for _ in range(_REPLACEMENTS):
            if self._kind not in node.all_processes:
                return
            node.all_processes[self._kind][0].process.wait()
            ended = time.monotonic()
            node.all_processes.pop(self._kind, None)
            print("the dashboard ended; it is started again", flush=True)
            node.start_api_server(include_dashboard=True, raise_on_failure=False)
            time.sleep(max(0.0, ended + _PAUSE_SECONDS - time.monotonic()))


def main() -> None:
    """Run `ray` with the arguments of this process."""
    from ray._private import node, ray_constants
    from ray.scripts.scripts import main as ray

    auxiliaries = Auxiliaries(ray_constants.PROCESS_TYPE_DASHBOARD)
    node.Node.dead_processes = lambda self: auxiliaries.essential(self)
    sys.exit(ray())


if __name__ == "__main__":
    main()
