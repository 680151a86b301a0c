"""Fault suite: real faults in a group under load, for dsv4 and for bare vLLM, and their results.

    python benchmarks/faults.py --list
    python benchmarks/faults.py --runs 3 --json benchmarks/faults.json --page docs/faults.md   # the whole matrix, dsv4
    python benchmarks/faults.py --bare --runs 1 --json benchmarks/faults.json      # the peer
    python benchmarks/faults.py --only "hang in a step of rank 1"
    python benchmarks/faults.py --soak --minutes 60 --json benchmarks/faults.json  # no faults: no verdict, no restart
    python benchmarks/faults.py --deaths 20 --json benchmarks/faults.json          # no lost request
    python benchmarks/faults.py --cost 2 --json benchmarks/faults.json             # cost of the agents without faults
    python benchmarks/faults.py --hosts DIR --json benchmarks/hosts.json           # on two machines of systemd-nspawn
    python benchmarks/faults.py --hosts DIR --blocked 10 --json benchmarks/hosts.json  # ten minutes without ssh
    python benchmarks/faults.py --runs 0 --page docs/faults.md --json benchmarks/faults.json   # the page only

Each finished run is written to the file at once; runs in the file are not repeated. A run takes at most ten minutes; a
run without a result is stored as an error and repeated by the next call. Requires root and an otherwise idle machine;
`--hosts` also the requirements of `tests/hosts`.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from dsv4_testkit.faults import machines, report, series
from dsv4_testkit.faults.bare import Bare
from dsv4_testkit.faults.cost import cost
from dsv4_testkit.faults.deaths import deaths
from dsv4_testkit.faults.judge import inflict, moment
from dsv4_testkit.faults.load import Shape
from dsv4_testkit.faults.matrix import BY_NAME, MATRIX
from dsv4_testkit.faults.soak import soak
from dsv4_testkit.faults.store import Store
from dsv4_testkit.faults.system import DSV4, System
from dsv4_testkit.faults.table import Fault

_LOCAL = Path(__file__).with_name("faults.json")
"""Results on one machine."""
_RUN_SECONDS = 600.0
"""Limit of one run."""
_MOST_ERRORS = 10
"""Number of runs without a result after which the suite ends, because the failure is not specific to a fault."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the table of faults and exit")
    parser.add_argument("--runs", type=int, default=1, help="runs of each fault (default: %(default)s)")
    parser.add_argument("--within", type=float, metavar="MINUTES", help="start no run after this time")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this fault; can be given more than once")
    parser.add_argument("--bare", action="store_true", help="run the peer instead: vLLM under Ray with restart loops")
    parser.add_argument("--clients", type=int, default=4, help="concurrent clients (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and prompts (default: %(default)s)")
    parser.add_argument(
        "--soak",
        action="store_true",
        help="bursts, long prompts, busy processors, pauses and short losses; exit code 1 after any restart",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the soak (default: %(default)s)")
    parser.add_argument("--deaths", type=int, metavar="N", help="cause N engine deaths under eight clients")
    parser.add_argument("--cost", type=float, metavar="MINUTES", help="measure processor time and memory of the agents")
    parser.add_argument("--hosts", type=Path, metavar="DIR", help="run the faults on two machines, kept in this folder")
    parser.add_argument("--blocked", type=float, metavar="MINUTES", help="with --hosts: a time without ssh instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results; finished runs in it are skipped")
    parser.add_argument(
        "--series", type=Path, metavar="DIR", help="store the head's samples for the tests of the rules"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="replace the tables of this page at the end")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="existing weights; by default they are made anew")
    options = parser.parse_args()
    if options.list:
        print(report.catalog(MATRIX))
        return 0
    if options.page is not None:
        try:
            report.update(options.page.read_text(), Store(None))
        except (OSError, ValueError) as error:
            parser.error(f"--page {options.page}: {error}")
    # Started processes end with this one, also after SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    known = {fault.name: fault for fault in machines.FAULTS} if options.hosts else BY_NAME
    unknown = [name for name in options.only or () if name not in known]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: no such fault; there are {', '.join(known)}")
    if options.hosts and (options.bare or options.page or options.series):
        parser.error("--hosts: has neither peer, page nor series; leave out --bare, --page and --series")
    if options.blocked is not None and not options.hosts:
        parser.error("--blocked: needs machines; add --hosts DIR")
    store = Store(options.json)
    if options.blocked is not None:
        return machines.blocked(machines.OnMachines(options.hosts), options.blocked, options.seed, store)
    weights = options.weights
    if options.soak:
        return soak(DSV4(weights), options.minutes, options.seed, store)
    if options.deaths is not None:
        return deaths(DSV4(weights), options.deaths, options.seed, store)
    if options.cost is not None:
        return cost(DSV4(weights), options.cost, options.seed, store)
    if options.series is not None:
        options.series.mkdir(parents=True, exist_ok=True)
    chosen = [known[name] for name in options.only or known]
    system: System = Bare(weights) if options.bare else DSV4(weights)
    if options.hosts:
        system = machines.OnMachines(options.hosts)
    if options.bare:
        chosen = [fault for fault in chosen if fault.bare]
    try:
        latest = None if options.within is None else time.monotonic() + options.within * 60.0
        load = Shape(clients=options.clients)
        errors = run_all(system, chosen, options.runs, options.seed, load, store, options.series, latest)
    finally:
        system.close()
        if options.page is not None:
            options.page.write_text(report.update(options.page.read_text(), store))
    print(report.summary(store))
    if options.hosts:
        print(machines.beside(Store(_LOCAL).runs, store.runs))
    return int(errors > 0)


def run_all(
    system: System,
    chosen: list[Fault],
    runs: int,
    seed: int,
    shape: Shape,
    store: Store,
    kept: Path | None,
    latest: float | None,
) -> int:
    """Run every chosen fault as often as due; all of them once before any of them twice.

    Returns the number of runs without a result.
    """
    due = [
        (fault, run) for run in range(1, runs + 1) for fault in chosen if not store.has(system.name, fault.name, run)
    ]
    print(f"{len(due)} runs to do, {len(chosen) * runs - len(due)} are done", flush=True)
    errors = 0
    if not due:
        return errors
    system.start()
    for number, (fault, run) in enumerate(due, 1):
        if latest is not None and time.monotonic() > latest:
            print(f"{len(due) - number + 1} runs remain for the next call", flush=True)
            return errors
        print(f"[{number}/{len(due)}] {fault.name}, run {run}, after {moment(seed, fault, run):.1f} s", flush=True)
        struck = time.time()
        try:
            with limited(_RUN_SECONDS):
                result = inflict(system, fault, run, seed, shape)
        except Exception as error:
            errors += 1
            text = f"{type(error).__name__}: {error}"
            print(f"  no result: {text}", flush=True)
            store.note("errors", {"struck": struck, "fault": fault.name, "run": run, "error": text[:2000]})
            if errors >= _MOST_ERRORS:
                print(f"{errors} runs had no result; stopped", flush=True)
                return errors
            system.close()
            system.start()
            continue
        store.add(result)
        print(f"  {report.line(result)}", flush=True)
        if kept is not None and isinstance(system, DSV4):
            series.keep(system, result, kept)
    return errors


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
