"""Route to the groups, as a file tells it, and the key that the tokens of their agents are made with."""

from __future__ import annotations

import logging
from pathlib import Path

from dsv4_runtime.contract.gateway import GatewayRoute

_log = logging.getLogger("dsv4.gateway")


class RouteFile:
    """The route as it is now in its file, which is always replaced as a whole."""

    def __init__(self, path: Path) -> None:
        """Read the route.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        self._path = path
        self._stamp = self._look()
        self.route = self._read()

    def changed(self) -> bool:
        """Tell whether there is a new one, which is in `route` then; one that cannot be read changes nothing."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            before, self.route = self.route, self._read()
        except (OSError, ValueError) as error:
            _log.warning("route %s cannot be read, the last one stays: %s", self._path, error)
            return False
        return self.route != before

    def token_key(self) -> str:
        """Return the deployment's token key.

        Raises:
            OSError: it cannot be read.
        """
        return Path(self.route.token_key_file).read_text().strip()

    def _look(self) -> tuple[int, int]:
        seen = self._path.stat()
        return seen.st_mtime_ns, seen.st_ino

    def _read(self) -> GatewayRoute:
        return GatewayRoute.model_validate_json(self._path.read_bytes())
