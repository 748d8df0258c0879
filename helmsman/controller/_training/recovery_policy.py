"""When the ranks of a training job are given up, and how often they are built anew; pure, with the time given from outside."""

from __future__ import annotations

import os

import msgspec

from helmsman.api.suggestions import Suggesting


class RecoveryPolicy(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """How a training job outlives its workers. Times in seconds."""

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
    probe_every_s: float = 2.0
    """Each rank is asked so often whether it is there. It answers beside a call that runs, so a busy rank is not given up."""
    dead_s: float = 60.0
    """A rank that has not answered for so long is ended, so that the calls which wait for it end. A busy one is not."""
    busy_s: float = 1800.0
    """A rank that does not answer but is seen to compute, since C code holds its interpreter's lock, is ended after so long
    without an answer; after ``dead_s`` where that is longer."""

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


class RecoveryBudget:
    """Counts recoveries. The time is given with each, in seconds on any clock that does not go back."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._begun: list[float] = []

    def num_recent(self, now: float) -> int:
        """Recoveries within the window that ends now."""
        return sum(now - at < self._policy.window_s for at in self._begun)

    def spend(self, now: float) -> float | None:
        """Begin one more recovery; returns the pause before it, None when there is none left."""
        num_recent = self.num_recent(now)
        if num_recent >= self._policy.max_recoveries:
            return None
        self._begun = [*self._begun, now][-self._policy.max_recoveries :]
        return float(self._policy.pause_s * 2**num_recent)
