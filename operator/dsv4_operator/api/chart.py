"""The tables of `security` and `endpoints` for the chart, whose policy is the same in CEL.

python -m dsv4_operator.api.chart > charts/dsv4-operator/files/security.json
python -m dsv4_operator.api.chart --markdown    # tables of docs/trust.md
"""

from __future__ import annotations

import json
import sys

from dsv4_operator.api.endpoints import ENDPOINT_VARIABLES, LINK_LOCAL, LINK_LOCAL_REFUSAL, URL
from dsv4_operator.api.owned import OTHER_FLAGS, among
from dsv4_operator.api.security import FLAGS, REFUSED_VARIABLES, VARIABLES, spellings


def table() -> dict[str, object]:
    """Return what the chart needs: the lists, and the conditions of CEL over them."""
    return {
        "flags": {flag: spellings(flag) for flag in FLAGS},
        "otherFlags": list(OTHER_FLAGS),
        "flagAmong": among("arg", "variables.refusedFlags", "variables.otherFlags"),
        "variables": f"^({'|'.join(VARIABLES)})$",
        "refusedVariables": f"^({'|'.join(REFUSED_VARIABLES)})$",
        "linkLocal": list(LINK_LOCAL),
        "linkLocalRefusal": LINK_LOCAL_REFUSAL,
        "endpointVariables": list(ENDPOINT_VARIABLES),
        "url": f"^(?:{URL.pattern})$",
    }


def markdown() -> str:
    """Return the tables of docs/trust.md."""
    rows = ["| flags | reason |", "|---|---|"]
    for reason in dict.fromkeys(FLAGS.values()):
        flags = ", ".join(f"`{flag}`" for flag, why in FLAGS.items() if why == reason)
        rows.append(f"| {flags} | {reason} |")
    rows += ["", "| variables that are taken | meaning |", "|---|---|"]
    rows += [f"| `{_in_table(pattern)}` | {meaning} |" for pattern, meaning in VARIABLES.items()]
    rows += ["", "| variables that are refused | reason |", "|---|---|"]
    rows += [f"| `{_in_table(pattern)}` | {reason} |" for pattern, reason in REFUSED_VARIABLES.items()]
    return "\n".join(rows) + "\n"


def _in_table(pattern: str) -> str:
    return pattern.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(
        markdown() if "--markdown" in sys.argv else json.dumps(table(), indent=2, ensure_ascii=False) + "\n"
    )
