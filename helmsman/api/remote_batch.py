"""A batch whose rows stay in the workers that made them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from helmsman.api.batch import Batch
from helmsman.api.parts import joined_padding

if TYPE_CHECKING:
    from helmsman.api.scheduler import ResultHandle, Scheduler


class Piece(NamedTuple):
    """Rows of a batch that is stored in a worker."""

    handle: ResultHandle
    start: int
    stop: int


class RemoteBatch(Batch):
    """A batch whose rows are stored in workers.

    As an argument of a call, rows move from worker to worker, each share to its rank; slices and
    chunks move nothing. Reading columns or meta in the script fetches all rows, once.
    ``release()``, or the end of a ``with`` statement, frees the rows; until then they use memory in
    their workers.

    Args:
        scheduler: The scheduler of the workers.
        pieces: Locations of the rows, in order.
        num_padding: Number of padding rows at the end.
    """

    __slots__ = ("_fetched", "_handles", "_pieces", "_scheduler")

    _fetched: Batch | None
    _handles: Mapping[str, ResultHandle]
    _pieces: Sequence[Piece]
    """Locations of its rows, in order."""
    _scheduler: Scheduler

    def __init__(self, scheduler: Scheduler, pieces: Sequence[Piece], num_padding: int = 0) -> None:
        handles = {piece.handle.id: piece.handle for piece in pieces}  # Also of empty pieces.
        self._fill(
            _scheduler=scheduler, _pieces=_with_rows(pieces), _handles=handles, _fetched=None
        )
        self._fill(_num_rows=sum(map(_num_rows, pieces)), num_padding=num_padding)

    def __getattr__(self, name: str) -> Any:
        if name not in ("columns", "meta"):  # These two are fetched on first use.
            raise AttributeError(f"a {type(self).__name__} has no {name!r}")
        return getattr(self.fetch(), name)

    def fetch(self) -> Batch:
        """Fetch the rows into the script.

        Raises:
            HandleLostError: A worker no longer has the rows.
        """
        if self._fetched is None:
            handles = {piece.handle.id: piece.handle for piece in self._pieces}
            found = {id_: self._scheduler.get(handle) for id_, handle in handles.items()}
            values = [(found[piece.handle.id], piece.start, piece.stop) for piece in self._pieces]
            self._fill(_fetched=_join(values, self.num_padding))
        assert self._fetched is not None
        return self._fetched

    def release(self) -> None:
        """Release the values in their workers, also for slices of this batch. Idempotent."""
        with contextlib.ExitStack() as releases:  # Releases all of them even if one fails.
            for handle in self._handles.values():
                releases.callback(self._scheduler.release, handle)

    def __enter__(self) -> RemoteBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _slice(self, start: int, stop: int) -> RemoteBatch:
        cut: list[Piece] = []
        first = 0
        for piece in self._pieces:
            low, high = (
                piece.start + min(max(at - first, 0), _num_rows(piece)) for at in (start, stop)
            )
            cut.append(Piece(piece.handle, low, high))
            first += _num_rows(piece)
        return RemoteBatch(self._scheduler, _with_rows(cut), self._padding_within(start, stop))

    def _extended(self, part: Batch, num_missing: int) -> Batch:
        last = [self._slice(len(self) - 1, len(self))] * num_missing
        return self._joined([part, *last], part.num_padding + num_missing) if num_missing else part

    @staticmethod
    def _joined(batches: Sequence[Batch], num_padding: int) -> RemoteBatch:
        found = [batch for batch in batches if isinstance(batch, RemoteBatch)]
        assert len(found) == len(batches)
        return RemoteBatch(
            found[0]._scheduler, [piece for batch in found for piece in batch._pieces], num_padding
        )

    @staticmethod
    def join(batches: Sequence[Batch]) -> RemoteBatch:
        """Concatenate batches without moving rows.

        Raises:
            ValueError: Rows of a batch would follow the padding of another.
        """
        padding = joined_padding([(len(batch), batch.num_padding) for batch in batches])
        return RemoteBatch._joined(batches, padding)

    def __repr__(self) -> str:
        where = dict.fromkeys(piece.handle.worker_id for piece in self._pieces)
        return f"RemoteBatch({len(self)} rows in {', '.join(where)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The codec replaces the handles with their values, so the receiver joins rows.
        return _join, ([tuple(piece) for piece in self._pieces], self.num_padding)


def _join(pieces: Sequence[tuple[Any, int, int]], num_padding: int) -> Batch:
    for value, _, _ in pieces:
        if not isinstance(value, Batch):
            raise TypeError(
                "a RemoteBatch can be sent only as an argument of a call; found a "
                f"{type(value).__qualname__} in place of its rows. Call fetch() first, and send "
                "the Batch"
            )
    return Batch._joined([value[start:stop] for value, start, stop in pieces], num_padding)


def _num_rows(piece: Piece) -> int:
    return piece.stop - piece.start


def _with_rows(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return the pieces that have rows, or the first piece, which defines the columns."""
    return [piece for piece in pieces if _num_rows(piece)] or pieces[:1]
