"""`ray start` without its dependence on the dashboard: `python -m dsv4_runtime.engine.ray_start ARGUMENTS`.

`ray start --block` ends the whole node when any of its processes ends. No engine needs the dashboard, so it is started
again instead, a bounded number of times.
"""

from __future__ import annotations

import sys
import time
from typing import Any

_REPLACEMENTS = 5
_PAUSE_SECONDS = 10.0


class Auxiliaries:
    """Replaces dead auxiliary processes of a `ray._private.node.Node`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._replaced = 0
        self._next = 0.0
        self._due = False

    def essential(self, node: Any, dead: list[tuple[str, Any]], now: float) -> list[tuple[str, Any]]:
        """Return the essential ones of the processes that ended; start the dashboard again if it is among them.

        Args:
            node: the Ray node.
            dead: kind and process, from `Node.dead_processes`.
            now: monotonic time.
        """
        if any(kind == self._kind for kind, _ in dead):
            node.all_processes.pop(self._kind, None)
            self._due = True
        if self._due and self._replaced < _REPLACEMENTS and now >= self._next:
            self._due = False
            self._replaced, self._next = self._replaced + 1, now + _PAUSE_SECONDS
            print("the dashboard ended; it is started again", flush=True)
            node.start_api_server(include_dashboard=True, raise_on_failure=False)
        return [(kind, process) for kind, process in dead if kind != self._kind]


def main() -> None:
    """Run `ray` with the arguments of this process."""
    from ray._private import node, ray_constants
    from ray.scripts.scripts import main as ray

    auxiliaries, dead_processes = Auxiliaries(ray_constants.PROCESS_TYPE_DASHBOARD), node.Node.dead_processes

    def essential(self: Any) -> list[tuple[str, Any]]:
        return auxiliaries.essential(self, dead_processes(self), time.monotonic())

    node.Node.dead_processes = essential
    sys.exit(ray())


if __name__ == "__main__":
    main()
