"""Seeded runs of faults between operators and a real API server, with an independent checker.

    python benchmarks/api_chaos.py --seeds 1-20             # a cluster of its own: 20 nodes of KWOK, ended afterwards
    python benchmarks/api_chaos.py --cluster NAME --seeds 7 # one that runs already (clusterkit up --nodes 0 --fake 20)

Each run has two operators, each behind a proxy (tests/kit/dsv4_testkit/chaos), and three deployments: one that nobody
touches, one with users and deaths, one whose members always fail. Several runs go on at once, each in a namespace.
Prints one line per run, and every violation of: at most one incarnation of a group, the restart budget, no restart
without a death, no status that goes back, no event before its status, no write without the lease, nothing left over,
everything as wanted soon after the last fault. With `--slow-etcd`, etcd is stopped for up to 1.5 s again and again
until the end of the last run, a third of the time in the mean. Exit code 1: there was a violation. Needs root, for
pods' addresses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import yaml

# The test cluster's kit is no package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

from chaos_world import Result, namespaces, run_seeds
from clusterkit import lifetime
from clusterkit.layout import Settings

from dsv4_testkit.scripted_agent import routed

ROOT = Path(__file__).parents[1]
NODES = 20


def seeds(text: str) -> list[int]:
    """`1-20`, `7` or `1-5,9`."""
    found: list[int] = []
    for one in text.split(","):
        first, _, last = one.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@contextlib.contextmanager
def slow_etcd(supervisor: int) -> Iterator[None]:
    """Stop etcd again and again within the block: every read and write waits as for a slow disk."""
    (etcd,) = (child for child in psutil.Process(supervisor).children(recursive=True) if child.name() == "etcd")
    draw, done = random.Random(0), threading.Event()

    def pulses() -> None:
        try:
            while not done.wait(draw.uniform(0.2, 3.0)):
                etcd.send_signal(signal.SIGSTOP)
                done.wait(draw.uniform(0.1, 1.5))
                etcd.send_signal(signal.SIGCONT)
        finally:
            etcd.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=pulses)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(result: Result) -> None:
    words = f"{len(result.wrong)} violations" if result.wrong else "ok"
    print(f"seed {result.seed}: {words}, settled after {result.settled_seconds:.1f} s", flush=True)
    for one in result.wrong:
        print(f"  seed {result.seed}: {one}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="NAME", help="one that runs (default: one is started, and ended)")
    parser.add_argument("--seeds", type=seeds, default=seeds("1-8"), help="such as 1-20 or 3,7 (default: 1-8)")
    parser.add_argument("--parallel", type=int, default=8, help="runs at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=25.0, help="of faults in a run (default: %(default)s)")
    parser.add_argument("--slow-etcd", action="store_true", help="etcd is stopped for short times during all runs")
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="dsv4-chaos-"))
    with contextlib.ExitStack() as stack:
        if options.cluster is None:
            cluster = stack.enter_context(lifetime.lasting(Settings("chaos", nodes=0, fake=NODES)))
        else:
            found = lifetime.running(options.cluster)
            if found is None:
                raise SystemExit(f"--cluster {options.cluster}: none of that name runs; start it with clusterkit up")
            cluster = found
        cluster.apply(yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text()))
        stack.enter_context(routed(cluster.state.addresses.fake_pods))
        parallel = min(options.parallel, len(options.seeds))
        configs = stack.enter_context(namespaces(cluster, parallel, logs))
        if options.slow_etcd:
            stack.enter_context(slow_etcd(cluster.state.supervisor))
        begun, used = time.monotonic(), _cpu_seconds()
        results = asyncio.run(run_seeds(cluster, options.seeds, configs, options.seconds, logs, _show))
        spent = time.monotonic() - begun
    counts = sum((one.counts for one in results), Counter[str]())
    wrong = sum(bool(one.wrong) for one in results)
    settled = sorted(one.settled_seconds for one in results)
    print(f"\n{len(results)} runs, {wrong} with violations, {spent:.0f} s, {parallel} at once, ", end="")
    print(f"{platform.machine()}, {os.cpu_count()} processors, {time.strftime('%Y-%m-%d')}; logs: {logs}")
    print(f"as wanted after the last fault: median {settled[len(settled) // 2]:.1f} s, at most {settled[-1]:.1f} s")
    print(f"processor time of runs and operators: {(_cpu_seconds() - used) / len(results):.1f} s a run")
    print("counts: " + ", ".join(f"{name.strip('_')} {count}" for name, count in counts.most_common()))
    sys.exit(1 if wrong else 0)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
