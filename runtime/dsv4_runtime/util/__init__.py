"""Utilities of the operator and the runtime that depend on the standard library alone."""

import re

LOG_FORMAT = "DSV4_LOG_FORMAT"
"""Environment variable with the format of logs: `text` (default) or `json`."""
LOG_DEPLOYMENT = "DSV4_LOG_DEPLOYMENT"
"""Environment variable of a gateway with `NAMESPACE/NAME` for its JSON lines and spans; its other settings lack it."""
TRACES = "DSV4_TRACES"
"""Environment variable of gateways and agents with the receiver of traces (`trace_receiver`); unset: there are none."""
_RECEIVER = re.compile(r"http://[^\s/@]+:[0-9]{1,5}/?|unix:(//)?/\S+")


def trace_receiver(text: str) -> str:
    """Return an address for OTLP over gRPC that vLLM accepts too, which encrypts nothing.

    Raises:
        ValueError: it is neither `http://HOST:PORT` nor `unix:PATH`.
    """
    if _RECEIVER.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no receiver of OTLP over gRPC; write http://HOST:4317 or unix:/PATH")
    return text
