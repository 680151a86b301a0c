"""URLs of sources, and the hosts that they may not name: link-local addresses and metadata services of clouds.

Members fetch from these URLs with their node's view of the network, and report what went wrong, so a URL must not reach
what only a node may ask. A name is refused by its text alone: what it resolves to is the network's to restrict.
"""

from __future__ import annotations

import re
from typing import Annotated

from dsv4_operator.api.values import Matches

_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PORT = r"(:(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3}))?"
_LABEL = r"[A-Za-z0-9_]([\w-]*[A-Za-z0-9_])?"
# No number in any of the ways to write one: programs take 2852039166, 0xa9.0xfe.43518 and 0251.254.43518 for addresses.
_LAST_LABEL = r"([A-Za-z_]([\w-]*\w)?|[1-9][0-9]*[A-Za-z_-]([\w-]*\w)?|0[0-9]*[A-WYZa-wyz_-]([\w-]*\w)?)"
_NAME = rf"({_LABEL}\.)*{_LAST_LABEL}\.?"
# Addresses that are routed or private. All other prefixes are local, mapped or translated.
_V6 = r"\[(::1|([23][0-9A-Fa-f]{3}|[Ff][CcDd][0-9A-Fa-f]{2})(:[0-9A-Fa-f]{0,4}){2,7})\]"

_AT = r"(?i)://([^/\s]*@)?"
_END = r"\.?([:/?#\s\"',;]|$)"
LINK_LOCAL = (
    rf"{_AT}(169\.254\.|(168\.63\.129\.16|100\.100\.100\.200|192\.0\.0\.192|metadata(\.google)?(\.internal)?|metadata\."
    rf"(goog|azure\.(internal|com)|tencentyun\.com|packet\.net)|instance-data(\.ec2\.internal)?){_END})",
    # The same as one number, with numbers of other bases, with fewer numbers, and within addresses of IPv6.
    rf"{_AT}((0x[0-9a-f]+|[0-9]{{8,}}|(0+251|0x0*a9|169)\.(254|0+376|0x0*fe|[0-9]{{4,}}|0x[0-9a-f]{{3,}})(\.[0-9a-fx]+)*)"
    rf"{_END}|\[([0:]*(f{{4}}:)?(a9fe:|169\.254\.)|fe[89ab]|0*64:f+9b:|2002:0*a9fe:|fd00:0*ec2:))",
)
"""Patterns of a text with a URL in it that has such a host."""
LINK_LOCAL_SHORT = r"(?i)://([^/\s]*@)?(169\.254\.|metadata\.google|\[fe[89ab]|\[::(ffff:)?(a9fe|169))"
"""The usual ones of them: API servers bound what the rules of a definition may cost together. The whole patterns are a
part of the policy of the chart."""
LINK_LOCAL_REFUSAL = "names a link-local address or the metadata service of a cloud; write the host of a store"

URL = Matches(
    # A host and a path: no user, no query and no fragment, which may have secrets in them.
    rf"https?://({_NAME}|{_BYTE}(\.{_BYTE}){{3}}|{_V6}){_PORT}(/[!\"$->@-~]*)?",
    "is not a URL of a host and a path; begin it with https:// and a host name, and put secrets into a Secret "
    "and name it in secretKeyRef",
    shown=r"[\w.:/\[\]-]*",
    never=tuple((pattern, LINK_LOCAL_REFUSAL) for pattern in LINK_LOCAL),
)
Url = Annotated[str, URL]

ENDPOINT_VARIABLES = (
    "HF_ENDPOINT",
    "HF_INFERENCE_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "S3_ENDPOINT_URL",
)
"""Environment variables that name a Hub or a store; what is true of the URL of a source is true of theirs."""


def is_link_local(text: str) -> bool:
    """Tell whether a URL in `text` has a link-local address or the metadata service of a cloud as its host."""
    return any(re.search(pattern, text, re.ASCII) for pattern in LINK_LOCAL)
