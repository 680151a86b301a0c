"""Errors that the API server may answer with instead of what was asked for."""

from __future__ import annotations


class KubeError(Exception):
    """The API server refused or failed a request; the text begins with the request and ends with the server's words."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        """Args:
        message: the request and what the server said of it.
        status: HTTP status; 0 if there was no answer.
        reason: the server's word for it (`metav1.StatusReason`), empty without one.
        """
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFound(KubeError):
    """There is no such object, or no such kind of object."""


class AlreadyExists(KubeError):
    """An object of that name is there already."""


class Conflict(KubeError):
    """The object is not the one, or not the version, that the request was about."""


class Forbidden(KubeError):
    """The account may not do that (401 and 403)."""


class Invalid(KubeError):
    """The server cannot accept the object (400 and 422)."""


class Gone(KubeError):
    """The resource version is too old to watch from: list again."""


class Unavailable(KubeError):
    """No answer in time, or a server that is overloaded or failing. Trying again later may help."""


_BY_STATUS: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: Unavailable,
}


def error_of(request: str, status: int, reason: str, message: str) -> KubeError:
    """Make the error for an answer.

    Args:
        request: method and path, for the text.
        status: HTTP status.
        reason: `reason` of the server's `Status` object.
        message: its `message`.
    """
    kind = AlreadyExists if reason == "AlreadyExists" else _BY_STATUS.get(status)
    if kind is None:
        kind = Unavailable if status >= 500 else KubeError
    return kind(f"{request}: {status} {message or reason}".rstrip(), status=status, reason=reason)
