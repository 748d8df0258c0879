"""Pairs of samples for losses that compare two answers to one prompt: DPO and the reward model.

The scalar entry ``pair`` of a sample, any integer, identifies its pair. Exactly two samples of a
batch share each value; the first one in the batch is the preferred one. Both stay together when a
batch is split over data-parallel ranks or into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from helmsman.api.engines import sample_numbers

PAIR = "pair"
"""Key of the sample entry that identifies its pair."""


def pair_samples(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> list[dict[str, Any]]:
    """Flatten (preferred, rejected) pairs into adjacent samples, with ``pair`` numbered from 0."""
    return [{**sample, PAIR: number} for number, pair in enumerate(pairs) for sample in pair]


def sample_units(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """Group sample indices that must stay together, in batch order: pairs, or single samples.

    Args:
        samples: All with ``pair``, or all without.

    Raises:
        ValueError: ``pair`` is not an integer, or is not shared by exactly two samples.
    """
    if not samples or PAIR not in samples[0]:
        return [(index,) for index in range(len(samples))]
    members: dict[int, list[int]] = {}
    numbers = sample_numbers(samples)
    for index, sample in enumerate(samples):
        try:
            number = int(sample[PAIR])
        except (TypeError, ValueError, RuntimeError) as exc:
            raise ValueError(
                f"sample {numbers[index]}: {PAIR!r} is {sample[PAIR]!r}; expected one integer, "
                "that of its pair"
            ) from exc
        members.setdefault(number, []).append(index)
    for number, indices in members.items():
        if len(indices) != 2:
            shown = ", ".join(str(numbers[index]) for index in indices[:6])
            raise ValueError(
                f"pair {number} has {len(indices)} sample(s) ({shown}); give {PAIR!r} to two "
                "samples, the preferred one first"
            )
    return [tuple(indices) for indices in members.values()]
