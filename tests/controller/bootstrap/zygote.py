"""Start the supervisors of nodes as forks of the zygote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.zygote import Program as Forked
from tests.zygote import start

__all__ = ["Forked", "Zygote"]

PRELOAD = ("helmsman.controller.cli", "tests.controller.bootstrap.supervisor")


class Zygote:
    """Starts programs whose output goes to a file."""

    def start(self, command: Sequence[str], environ: Mapping[str, str], output: Path) -> Forked:
        """Start ``python -m MODULE ARGUMENTS`` in a session of its own."""
        with output.open("wb") as file:
            return start(command, env=environ, stdout=file, preload=PRELOAD)

    def close(self) -> None:
        """Do nothing: the zygote ends with the session."""
