"""The token of one incarnation, for its agents, Ray and vLLM's port.

Each incarnation has a token of its own, so a leaked one becomes useless with the next incarnation. Tokens are derived
from the deployment's token key, which the operator and the gateways have and members never do: a token is a random salt
and the HMAC of that salt under the key. The refusal of an agent contains its salt, from which a holder of the key
derives the token at once; a mounted Secret would reach gateways up to a minute after a repair. Salts are random, so no
token of a future incarnation can be obtained.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping

CHALLENGE = "WWW-Authenticate"
"""The header of a refusal that names the salt."""
_SALT_CHARS = 32
_SALT = re.compile(rf'Bearer realm="dsv4", salt="([0-9a-f]{{{_SALT_CHARS}}})"')


def new_key() -> str:
    """Return a token key for a deployment: 256 random bits as text."""
    return secrets.token_hex(32)


def new_token(key: str) -> str:
    """Return the token of a new incarnation: 96 hexadecimal digits."""
    return token_of(key, secrets.token_hex(_SALT_CHARS // 2))


def challenge(token: str) -> str:
    """Return the value of `CHALLENGE` in the refusal of a server with this `token`."""
    return f'Bearer realm="dsv4", salt="{token[:_SALT_CHARS]}"'


def token_of(key: str, salt: str) -> str:
    """Return the token with that salt, 32 hexadecimal digits."""
    return salt + hmac.digest(key.encode(), f"dsv4 incarnation {salt}".encode(), "sha256").hex()


def canary_token(key: str) -> str:
    """Return the token that opens `GET /dsv4/canary` of a gateway: 64 hexadecimal digits.

    It depends on the token key alone, and neither the tokens of incarnations nor the clients' API keys equal it.
    """
    return hmac.digest(key.encode(), b"dsv4 canary", "sha256").hex()


class AgentCredential:
    """Credential for one agent, whose token differs in every incarnation."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        """The latest required token; empty before the first refusal if none is known."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers of a request to the agent."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def answer(self, key: str, shown: Mapping[str, str], refusal: Mapping[str, str]) -> bool:
        """Derive the token that a refusal requires; return whether it differs from the token of the request.

        Several requests may be in flight: one that was sent before another one's refusal has an older token. `key` is
        the deployment's token key, `shown` are the `headers` of the refused request, `refusal` those of the answer 401.
        """
        found = _SALT.fullmatch(refusal.get(CHALLENGE, ""))
        if found is None:
            return False
        self.token = token_of(key, found[1])
        return self.headers != shown
