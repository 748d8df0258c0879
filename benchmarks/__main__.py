"""Measure cases next to their floors: python -m benchmarks [--list] [case ...]"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import benchmarks.cases  # noqa: F401 - declares them
from benchmarks import report
from benchmarks.harness import CASES, SkippedError, measure, select
from benchmarks.world import World

OUT = Path(__file__).parent / "out"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases and write their results.

    Returns 1 when a case broke and 2 for an unknown name; a missed goal is no failure.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "cases",
        nargs="*",
        help="names, or leading parts of names; all that do not need extra time when none",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT,
        help="folder of results.json and ratios.png, which are replaced",
    )
    parser.add_argument("--list", action="store_true", help="show the cases and run none")
    options = parser.parse_args(arguments)
    try:
        cases = select([name for given in options.cases for name in given.split(",") if name])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for each in CASES.values():
            named = "" if each.is_default else " (only when named)"
            print(f"{each.name:<40}{each.unit:<8}{each.goal:<9}{each.floor}{named}")
        return 0
    print(f"{_machine()}\n\n{report.HEADER}", flush=True)
    results, broken = [], []
    started = time.monotonic()
    try:
        with World() as world:
            for each in cases:
                try:
                    results.append(measure(each, world))
                # A broken case does not discard the figures of the others.
                except SkippedError as reason:
                    print(f"{each.name}: skipped. {reason}", flush=True)
                except Exception:  # noqa: BLE001
                    traceback.print_exc()
                    broken.append(each.name)
                else:
                    print(report.line(results[-1]), flush=True)
    finally:  # also after Ctrl-C
        report.write(results, options.out)
    judged = [result.met for result in results if result.met is not None]
    print(
        f"\n{sum(judged)} of {len(judged)} goals met; {time.monotonic() - started:.0f} s; results "
        f"in {options.out}"
    )
    if broken:
        print(f"broken: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def _machine() -> str:
    versions = []
    for name in ("ray", "torch", "numpy", "msgspec"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores, load {load}, Python {platform.python_version()}, {', '.join(versions)}"


if __name__ == "__main__":
    sys.exit(main())
