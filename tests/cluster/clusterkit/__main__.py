"""A Kubernetes cluster of real parts on one machine, for the tests and for manual use (docs/development.md).

`python -m clusterkit up|down|node|build|load|prepare`; `make cluster-up` and `make cluster-down` call it. A supervisor
(supervisor.py) starts every part as its child, and every part ends with the supervisor, in any case:

- the control plane runs on the machine itself, each program with a death signal (processes.py);
- a real node is a process namespace with its own network, mounts and host name (nodes.py, node_init.py): when its
  first process ends, the kernel ends the node's kubelet, containerd and containers and drops its mounts;
- the network between nodes is a bridge in its own namespace with one cable to the machine (network.py).

Empty control groups and files may remain; `down` removes them and reports their number.
"""

from __future__ import annotations

import argparse

from clusterkit import build, images, lifetime
from clusterkit.layout import DEFAULT_NAME, Settings
from clusterkit.waiting import ClusterError, main_guard, say


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="clusterkit", description="A Kubernetes cluster of real parts, for tests.")
    parser.add_argument(
        "--name", default=DEFAULT_NAME, help="several clusters can run side by side (default: %(default)s)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster that stays")
    up.add_argument("--nodes", type=int, default=2, help="real nodes (default: %(default)s)")
    up.add_argument("--fake", type=int, default=0, help="nodes of KWOK (default: %(default)s)")
    up.add_argument("--k3s", action="store_true", help="with k3s' datastore (kine) and policy controller (kube-router)")
    commands.add_parser("down", help="end it, and remove what one that was killed has left")
    node = commands.add_parser("node", help="power and cable of a real node")
    node.add_argument("action", choices=["stop", "start", "cut", "plug"])
    node.add_argument("node")
    made = commands.add_parser("build", help="build programs, and print the folder that they are in")
    made.add_argument("module", choices=list(build.MODULES))
    commands.add_parser("load", help="build the operator's and the runtime's image, and put them on every real node")
    commands.add_parser("prepare", help="install and build whatever clusters and their tests need, ahead of them")
    return parser.parse_args()


def main() -> int:
    """Execute the command line."""
    said = _arguments()
    match said.command:
        case "up":
            cluster = lifetime.start(Settings(said.name, said.nodes, said.fake, said.k3s))
            say("is up. To use it:")
            print(f'export KUBECONFIG={cluster.kubeconfig} PATH="{cluster.programs}:$PATH"')
        case "down":
            lifetime.end(said.name)
        case "build":
            print(build.built(said.module))
        case "prepare":
            lifetime.prepare(Settings(nodes=1, fake=1))
            for module in (*build.REQUIRED, *build.OPTIONAL):
                build.built(module)
            images.base()
        case "load":
            if not (found := lifetime.running(said.name)):
                raise ClusterError(f"cluster {said.name!r} does not run (make cluster-up)")
            for archive in (images.operator(), images.runtime()):
                found.load(archive)
        case "node":
            if not (found := lifetime.running(said.name)):
                raise ClusterError(f"cluster {said.name!r} does not run (make cluster-up)")
            found.node(said.action, said.node)
    return 0


if __name__ == "__main__":
    main_guard(main)
