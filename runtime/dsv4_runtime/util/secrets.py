"""Recognition of secrets by name or format: they are refused in a specification and in the engine's environment."""

from __future__ import annotations

import re

VARIABLE = (
    r"^(?:.*_)?(?:TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|SECRET_KEY|API_KEY|APIKEY|ACCESS_KEY|ACCESS_KEY_ID|"
    r"PRIVATE_KEY|CREDENTIALS?)$"
)
"""Names of environment variables whose values are secrets: `HF_TOKEN`, `AWS_SECRET_ACCESS_KEY`, `VLLM_API_KEY`."""
_IN_URL = r"://[^/@ ]*:[^/@ ]+@"
_SIGNED = r"eyJ[A-Za-z0-9_-]{10,}[.]eyJ"
VALUES = (
    r"hf_[A-Za-z0-9]{30}|(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30}",
    rf"github_pat_[A-Za-z0-9_]{{30}}|(?:nvapi|sk)-[A-Za-z0-9_-]{{30}}|{_IN_URL}",
    rf"-----BEGIN [A-Z ]*PRIVATE KEY-----|{_SIGNED}",
)
"""Patterns of secret values: access tokens of Hugging Face, AWS, GitHub, NVIDIA and OpenAI, passwords in URLs, private
keys, JSON web tokens. In the common syntax of Python's `re` and RE2; each is short, because API servers bound the cost
of a rule."""
# The same for Python's `re`, which would take quadratic time for two of them, because it retries each `eyJ` of a word
# and each colon. If a word's first `eyJ` begins no token, none does; a user's name ends at the first colon.
_FOR_PYTHON = (
    VALUES[0],
    VALUES[1].replace(_IN_URL, r"://[^/@ :]*:[^/@ ]+@"),
    VALUES[2].replace(_SIGNED, r"(?<![A-Za-z0-9_-])(?>[A-Za-z0-9_-]*?eyJ)[A-Za-z0-9_-]{10,}[.]eyJ"),
)


def is_secret_name(name: str) -> bool:
    """Return whether the environment variable `name` contains a secret."""
    return re.fullmatch(VARIABLE, name, re.ASCII | re.IGNORECASE) is not None


def has_secret(text: str) -> bool:
    """Return whether `text` contains a string with the format of a secret."""
    return any(re.search(value, text, re.ASCII) for value in _FOR_PYTHON)
