"""When the ranks of a training job are given up, and how often they are rebuilt."""

from __future__ import annotations

import os

from helmsman.api.supervision import ProbePolicy


class RecoveryPolicy(ProbePolicy, frozen=True, kw_only=True):
    """How a training job outlives its workers. A rank that is dead by ``dead_s`` or ``busy_s`` is ended, so that the calls
    which wait for it end. Times in seconds."""

    checkpoints: str | os.PathLike[str]
    """Folder of the checkpoints, which every node reaches."""
    save_every: int
    """Steps between two of them; the last step is saved, too."""
    num_kept: int = 3
    """Checkpoints that stay, the newest."""
    save_in_background: bool = False
    """Write checkpoints while the next steps are done. One counts at the end of the step in which it is complete; a loss before
    that costs the steps since the one before it."""
    max_recoveries: int = 3
    """Within ``window_s``; one more loss ends the run."""
    window_s: float = 3600.0
    pause_s: float = 1.0
    """Before the first recovery; doubled with each more within the window."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("save_every", self.save_every, 1),
            ("num_kept", self.num_kept, 1),
            ("max_recoveries", self.max_recoveries, 0),
            ("pause_s", self.pause_s, 0),
        ):
            if not value >= least:
                raise ValueError(f"{name} is {value:g}; expected {least} or more")
        if not self.window_s > 0:
            raise ValueError(f"window_s is {self.window_s:g}; expected more than 0")
        if not 0 < self.probe_every_s <= self.dead_s:
            raise ValueError(
                f"probe_every_s {self.probe_every_s:g} and dead_s {self.dead_s:g} must be in this order, and above 0"
            )
