"""Utilities of the operator and the runtime that depend on the standard library alone."""

import importlib.util
import re
from collections.abc import Mapping

LOG_FORMAT = "DSV4_LOG_FORMAT"
"""Environment variable with the format of logs: `text` (default) or `json`."""
LOG_DEPLOYMENT = "DSV4_LOG_DEPLOYMENT"
"""Environment variable of a gateway with `NAMESPACE/NAME` for its JSON lines and spans; its other settings lack it."""
TRACES = "DSV4_TRACES"
"""Environment variable of gateways and agents with the receiver of traces (`trace_receiver`); unset: there are none."""
_RECEIVER = re.compile(r"http://[^\s/@]+:[0-9]{1,5}/?|unix:(//)?/\S+")

_VLLM_IMPORTS = (
    "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.sdk",
)


def trace_receiver(text: str) -> str:
    """Return an address for OTLP over gRPC that vLLM accepts too, which encrypts nothing.

    Raises:
        ValueError: it is neither `http://HOST:PORT` nor `unix:PATH`.
    """
    if _RECEIVER.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no receiver of OTLP over gRPC; write http://HOST:4317 or unix:/PATH")
    return text


def trace_settings(
    arguments: tuple[str, ...], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the further arguments and variables of a vLLM that sends its spans to the receiver in `environment`.

    Args:
        arguments: of vLLM; with a receiver of their own nothing is added.
        environment: of the agent.

    Raises:
        ValueError: the variable has a wrong value, or a package is missing, without which vLLM would not start.
    """
    receiver = environment.get(TRACES)
    if not receiver or any(one.startswith("--otlp-traces-endpoint") for one in arguments):
        return (), {}
    for module in _VLLM_IMPORTS:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ValueError(f"{receiver} is not used, because Python has no {module}; install dsv4[tracing]")
    variables = {"OTEL_SERVICE_NAME": "vllm", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    return (f"--otlp-traces-endpoint={trace_receiver(receiver)}",), variables
