"""Makes the files in `manifests/` again: `make manifests`.

Helm renders `install.yaml`, so that both ways to install the operator give the same objects. The chart has the
definition by a link to `crd.yaml`.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from dsv4_operator.api import crd

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "dsv4-operator"
DEFINITION = ROOT / "manifests" / "crd.yaml"
INSTALL = ROOT / "manifests" / "install.yaml"

NAMESPACE = "dsv4-system"
# The definition is a file of its own: whoever deletes the operator's objects must not delete every deployment with it.
VALUES = ("crds.enabled=false",)
_HEAD = f"""\
# The operator without helm: kubectl apply --server-side -f manifests/crd.yaml -f manifests/install.yaml
# Made from charts/dsv4-operator with its default values: make manifests
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    app.kubernetes.io/part-of: dsv4
    pod-security.kubernetes.io/enforce: restricted
"""


def install(helm: Path) -> str:
    """`install.yaml`, as the program `helm` renders it.

    Raises:
        subprocess.CalledProcessError: helm failed; its message is in `stderr`.
    """
    command = [helm, "template", "dsv4", CHART, "--namespace", NAMESPACE]
    settings = [word for value in VALUES for word in ("--set", value)]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=60, check=True)
    return _HEAD + done.stdout


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--helm", type=Path, default=Path("helm"), help="the program [default: that on the path]")
    options = parser.parse_args()
    DEFINITION.write_text(crd.render())
    INSTALL.write_text(install(options.helm))


if __name__ == "__main__":
    main()
