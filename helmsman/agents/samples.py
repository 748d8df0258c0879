"""Training samples of sessions, and advantages of their turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Sample(msgspec.Struct, kw_only=True):
    """A training sample: one branch of a session, from its first token to its last turn."""

    input_ids: list[int]
    """(T,) tokens, exactly as they were sent to the engine and sampled from it."""
    loss_mask: list[int]
    """(T,) 1 for sampled tokens. A token that several branches share is 1 in the first only."""
    logprobs: list[float]
    """(T,) natural log-probabilities of sampled tokens; 0.0 elsewhere."""
    versions: list[int]
    """(T,) weight versions of sampled tokens; -1 elsewhere."""
    turn_ends: list[int]
    """Number of tokens up to the end of each turn of the model, ascending."""
    turn_rewards: list[float]
    """Reward of each turn itself; 0.0 if it was not given one."""
    reward: float
    """Reward of the session, in addition to those of its turns."""
    session_id: str
    """Shared by the samples of one session."""
    is_truncated: bool = False
    """Whether its last turn was cut off, by a limit of tokens."""

    @property
    def continuation(self) -> list[int]:
        """The tokens from the first sampled one on."""
        return self.input_ids[self.loss_mask.index(1) :] if any(self.loss_mask) else []

    def returns(self, discount: float = 1.0) -> list[float]:
        """Return the discounted sum of later rewards for each turn.

        Args:
            discount: Factor per turn.

        Returns:
            One number per turn; the session's reward counts at the last turn.
        """
        found: list[float] = []
        total = self.reward
        for reward in reversed(self.turn_rewards):
            total = reward + discount * total if found else reward + total
            found.append(total)
        return found[::-1]

    def per_token(self, of_turns: Sequence[float]) -> list[float]:
        """Return a number per token from one per turn, such as an advantage.

        Args:
            of_turns: One number per turn.

        Returns:
            (T,) numbers; tokens between two turns have that of the later one.
        """
        found: list[float] = []
        for value, end in zip(of_turns, self.turn_ends, strict=True):
            found += [value] * (end - len(found))
        return found


def turn_advantages(
    group: Sequence[Sequence[Sample]], discount: float = 1.0, *, normalize_std: bool = True
) -> list[list[list[float]]]:
    """Return an advantage for each turn of the sessions that answer one task.

    A turn's return is the discounted sum of its reward and the later ones. Its advantage is the
    return minus the mean return of the turns with the same number in the group's sessions.

    Args:
        group: The samples of each session.
        discount: Factor per turn.
        normalize_std: Divide by the standard deviation of the returns of that turn.

    Returns:
        By session and sample, one number per turn; ``Sample.per_token`` spreads them.
    """
    returns = [[sample.returns(discount) for sample in session] for session in group]
    by_turn: dict[int, list[float]] = {}
    for session in returns:
        for sample in session:
            for number, value in enumerate(sample):
                by_turn.setdefault(number, []).append(value)
    means = {number: statistics.fmean(values) for number, values in by_turn.items()}
    spreads = {
        number: (statistics.pstdev(values) + 1e-6 if normalize_std else 1.0)
        for number, values in by_turn.items()
    }
    return [
        [
            [(value - means[number]) / spreads[number] for number, value in enumerate(sample)]
            for sample in session
        ]
        for session in returns
    ]
