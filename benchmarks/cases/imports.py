"""Duration of importing the library in a new process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from benchmarks.harness import Pair, case
from benchmarks.world import World


@case("imports.helmsman", unit="ms", floor="python -c pass")
def helmsman(world: World) -> Pair:
    """Run a whole process that imports the library."""
    return Pair(ours=_process("import helmsman"), floor=_process("pass"), rounds=12, warm_up=2)


def _process(code: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", code], check=True)
