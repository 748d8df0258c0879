"""A training run that kills itself: ``python -m tests.field.killed_run CALL RECIPE FLAGS...``.

It counts the calls of functions of ``helmsman`` in its main thread once a step is recorded. At the
call of this number it ends by SIGKILL; with 0 it prints the number of calls until the last step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import helmsman
from helmsman.recipes.command import main

PACKAGE = str(Path(helmsman.__file__).parent)


class Counter:
    """Counts calls after the first recorded step.

    Args:
        last: Number of the call at which the process ends.
        metrics: File that has the header line and a line for each step.
    """

    def __init__(self, last: int, metrics: Path) -> None:
        self.num_calls, self.last, self.metrics = 0, last, metrics
        self.has_begun = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if not self.has_begun:
            if frame.f_code.co_qualname != "GRPOLoop.step" or not self.metrics.exists():
                return
            self.has_begun = self.metrics.read_bytes().count(b'"step"') >= 2
        self.num_calls += 1
        if self.num_calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    counter = Counter(int(sys.argv[1]), out / "metrics.jsonl")
    sys.setprofile(counter)
    code = main(sys.argv[2], sys.argv[3:])
    sys.setprofile(None)
    print(f"calls {counter.num_calls}")
    sys.exit(code)
