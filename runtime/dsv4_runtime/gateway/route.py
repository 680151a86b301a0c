"""Route to the groups, from a file, and the key that the tokens of their agents are made with."""

from __future__ import annotations

import logging
from pathlib import Path

from dsv4_runtime.contract.gateway import GatewayRoute

_log = logging.getLogger("dsv4.gateway")


class TokenKeyError(ValueError):
    """The file with the token key cannot be used; the text names it and the reason."""


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
        """Return the deployment's token key as it is now in its file.

        Raises:
            TokenKeyError: there is none that can be read.
        """
        path = self.route.token_key_file
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "it is no text"
            message = f"the token key file {path} cannot be read ({reason}); mount the deployment's"
            raise TokenKeyError(message) from None
        if not key:
            raise TokenKeyError(f"the token key file {path} is empty; mount the deployment's")
        return key

    def _look(self) -> tuple[int, int]:
        seen = self._path.stat()
        return seen.st_mtime_ns, seen.st_ino

    def _read(self) -> GatewayRoute:
        return GatewayRoute.model_validate_json(self._path.read_bytes())
