"""Measure the tiers of tests: python -m benchmarks.tiers [tier,...]

Each tier is a target of the Makefile. The printed rows are those of the table in CONTRIBUTING.md.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TIERS = ("unit", "check", "test", "nightly")
HEADER = "| command | tests | minutes | CPU minutes |\n|---|---|---|---|"
_PR_SET_CHILD_SUBREAPER = 36


class Measured(NamedTuple):
    """The cost of one tier."""

    tier: str
    num_tests: int
    """Tests that passed."""
    wall_s: float
    cpu_s: float
    """CPU seconds, user and system, of all processes of the tier."""
    succeeded: bool

    @property
    def row(self) -> str:
        """The row of the table."""
        note = "" if self.succeeded else " (failed)"
        return (
            f"| `make {self.tier}`{note} | {self.num_tests:,} "
            f"| {self.wall_s / 60:.1f} | {self.cpu_s / 60:.1f} |"
        )


def count_passed(output: str) -> int:
    """Sum the passed tests over the closing lines of several pytest runs."""
    closing = re.findall(r"^=*\s?(?:.*, )?(\d+) passed\b.* in [\d.]+s", output, re.MULTILINE)
    return sum(int(number) for number in closing)


def reap() -> None:
    """Wait for the processes that became children of this one when their parents exited."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def measure(tier: str) -> Measured:
    """Run a tier and add up the CPU time of its processes."""
    before, started = os.times(), time.monotonic()
    run = subprocess.Popen(
        ["make", "--no-print-directory", tier],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        print(line, end="", file=sys.stderr, flush=True)
        lines.append(line)
    code = run.wait()
    wall_s = time.monotonic() - started
    reap()
    after = os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])
    return Measured(tier, count_passed("".join(lines)), wall_s, cpu_s, code == 0)


def main(arguments: list[str]) -> int:
    """Print a row for each tier; 1 when one failed, 2 for an unknown one."""
    tiers = [name for given in arguments for name in given.split(",") if name] or list(TIERS)
    if unknown := [name for name in tiers if name not in TIERS]:
        print(f"no such tier: {', '.join(unknown)}; there are {', '.join(TIERS)}", file=sys.stderr)
        return 2
    # Processes whose parent exits become children of this one, which counts their CPU time.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    measured = [measure(tier) for tier in tiers]
    print("\n".join([HEADER, *(each.row for each in measured)]))
    return 0 if all(each.succeeded for each in measured) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
