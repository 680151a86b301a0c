"""Utilities of the operator and the runtime that depend on the standard library alone."""

LOG_FORMAT = "DSV4_LOG_FORMAT"
"""Environment variable with the format of logs: `text` (default) or `json`."""
LOG_DEPLOYMENT = "DSV4_LOG_DEPLOYMENT"
"""Environment variable of a gateway with `NAMESPACE/NAME` for its JSON lines; its other settings lack it."""
