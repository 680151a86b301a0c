"""The fault suite: real faults in a group under load, for dsv4 and for bare vLLM, and what became of them.

    python benchmarks/faults.py --list
    python benchmarks/faults.py --runs 3 --json faults.json             # every fault, dsv4
    python benchmarks/faults.py --bare --runs 1 --json faults.json      # the peer's column
    python benchmarks/faults.py --only "hang in a step of rank 1"
    python benchmarks/faults.py --soak 30 --json faults.json            # nothing wrong: no verdict, no restart
    python benchmarks/faults.py --deaths 20 --json faults.json          # no lost request
    python benchmarks/faults.py --cost 2 --json faults.json             # what the agents take while nothing is wrong
    python benchmarks/faults.py --page docs/faults.md --json faults.json

Each finished run is in the file at once, and what is there is not run again. Needs root, and a quiet machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from dsv4_testkit.faults import report, series
from dsv4_testkit.faults.bare import Bare
from dsv4_testkit.faults.cost import cost
from dsv4_testkit.faults.deaths import deaths
from dsv4_testkit.faults.judge import inflict, moment
from dsv4_testkit.faults.load import Shape
from dsv4_testkit.faults.soak import soak
from dsv4_testkit.faults.store import Store
from dsv4_testkit.faults.system import DSV4, System
from dsv4_testkit.faults.table import BY_NAME, FAULTS, Fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the table of faults, and do nothing")
    parser.add_argument("--runs", type=int, default=1, help="of each fault (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault; can be given more than once")
    parser.add_argument("--bare", action="store_true", help="the peer instead: vLLM under Ray with restart loops")
    parser.add_argument("--clients", type=int, default=4, help="that ask all the time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and prompts (default: %(default)s)")
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="load, pauses and short losses; no death is right"
    )
    parser.add_argument("--deaths", type=int, metavar="N", help="engine deaths under eight clients")
    parser.add_argument("--cost", type=float, metavar="MINUTES", help="processor time and memory of the agents")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results are kept, and resumed from")
    parser.add_argument("--series", type=Path, metavar="DIR", help="keep what the head saw, for the rules' tests")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table's page from the results, then end")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="made earlier; else they are made anew")
    options = parser.parse_args()
    if options.list:
        print(report.catalog(FAULTS))
        return 0
    if options.page is not None:
        if options.json is not None and not options.json.is_file():
            parser.error(f"--json {options.json}: no such file; without --json the page has the table of faults only")
        options.page.write_text(report.page(Store(options.json)))
        return 0
    # Whatever was started ends with this process, also when it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    unknown = [name for name in options.only or () if name not in BY_NAME]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: no such fault; --list shows their names")
    store = Store(options.json)
    weights = options.weights
    if options.soak is not None:
        return soak(DSV4(weights), options.soak, options.seed, store)
    if options.deaths is not None:
        return deaths(DSV4(weights), options.deaths, options.seed, store)
    if options.cost is not None:
        return cost(DSV4(weights), options.cost, options.seed, store)
    if options.series is not None:
        options.series.mkdir(parents=True, exist_ok=True)
    chosen = [BY_NAME[name] for name in options.only] if options.only else list(FAULTS)
    system: System = Bare(weights) if options.bare else DSV4(weights)
    if options.bare:
        chosen = [fault for fault in chosen if fault.bare]
    try:
        run_all(system, chosen, options.runs, options.seed, options.clients, store, options.series)
    finally:
        system.close()
    print(report.summary(store))
    return 0


def run_all(
    system: System, chosen: list[Fault], runs: int, seed: int, clients: int, store: Store, kept: Path | None
) -> None:
    """Every chosen fault as often as it still has to be run; all of them once before any of them twice."""
    due = [
        (fault, run) for run in range(1, runs + 1) for fault in chosen if not store.has(system.name, fault.name, run)
    ]
    print(f"{len(due)} runs to do, {len(chosen) * runs - len(due)} are there", flush=True)
    if not due:
        return
    system.start()
    for number, (fault, run) in enumerate(due, 1):
        print(f"[{number}/{len(due)}] {fault.name}, run {run}, after {moment(seed, fault, run):.1f} s", flush=True)
        result = inflict(system, fault, run, seed, Shape(clients=clients))
        store.add(result)
        print(f"  {report.line(result)}", flush=True)
        if kept is not None and isinstance(system, DSV4):
            series.keep(system, result, kept)


if __name__ == "__main__":
    sys.exit(main())
