"""A batch whose rows stay in the workers that made them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from helmsman.api.batch import Batch
from helmsman.api.columns import Column

if TYPE_CHECKING:
    from helmsman.api.scheduler import ResultHandle, Scheduler


class Piece(NamedTuple):
    """Rows of a batch that lies in a worker."""

    handle: ResultHandle
    start: int
    stop: int


class RemoteBatch(Batch):
    """Rows that lie in workers, as one batch.

    Given to a call they move from worker to worker, each rank's share to that rank; slices and chunks move nothing. Whoever
    looks at columns or meta in the script fetches all of it, once. ``release()``, or the end of a with statement, lets the
    workers forget the rows; until then they keep their memory.
    """

    __slots__ = ("_fetched", "_handles", "_pieces", "_scheduler")

    _fetched: Batch | None
    _handles: Sequence[ResultHandle]
    _pieces: tuple[Piece, ...]
    _scheduler: Scheduler

    def __init__(self, scheduler: Scheduler, pieces: Sequence[Piece], num_padding: int = 0) -> None:
        set_ = object.__setattr__
        set_(self, "_scheduler", scheduler)
        set_(self, "_pieces", tuple(piece for piece in pieces if piece.stop > piece.start) or tuple(pieces[:1]))
        set_(self, "_handles", tuple({piece.handle.id: piece.handle for piece in pieces}.values()))  # also of no rows
        set_(self, "_fetched", None)
        self._freeze({}, {}, sum(piece.stop - piece.start for piece in pieces), num_padding)

    @property
    def pieces(self) -> Sequence[Piece]:
        """Where its rows lie, in order."""
        return self._pieces

    @property
    def columns(self) -> Mapping[str, Column]:
        """As Batch; fetches the rows."""
        return self.fetch().columns

    @property
    def meta(self) -> Mapping[str, Any]:
        """As Batch; fetches the rows."""
        return self.fetch().meta

    def fetch(self) -> Batch:
        """The rows themselves, here. Raises: HandleLostError."""
        if self._fetched is None:
            handles = {piece.handle.id: piece.handle for piece in self._pieces}
            found = {id_: self._scheduler.get(handle) for id_, handle in handles.items()}
            values = [(found[piece.handle.id], piece.start, piece.stop) for piece in self._pieces]
            object.__setattr__(self, "_fetched", _join(values, self.num_padding))
        assert self._fetched is not None
        return self._fetched

    def release(self) -> None:
        """Let the workers forget the values that its rows are part of, also for slices. Idempotent."""
        with contextlib.ExitStack() as releases:  # all of them, also when one fails
            for handle in self._handles:
                releases.callback(self._scheduler.release, handle)

    def __enter__(self) -> RemoteBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _extended(self, part: Batch, num_missing: int) -> Batch:
        if not num_missing:
            return part
        assert isinstance(part, RemoteBatch)
        last = self._pieces[-1]
        copies = [Piece(last.handle, last.stop - 1, last.stop)] * num_missing
        return RemoteBatch(self._scheduler, [*part.pieces, *copies], part.num_padding + num_missing)

    def with_padding(self, num_padding: int) -> Batch:
        """As Batch; the rows stay where they are."""
        if not 0 <= num_padding <= len(self):
            raise ValueError(f"num_padding is {num_padding} of {len(self)} rows")
        return RemoteBatch(self._scheduler, self._pieces, num_padding)

    def unpad(self) -> Batch:
        """As Batch; the rows stay where they are."""
        return self._slice(0, len(self) - self.num_padding)

    def _slice(self, start: int, stop: int) -> Batch:
        found: list[Piece] = []
        first = 0
        for piece in self._pieces:
            low, high = max(start - first, 0), min(stop - first, piece.stop - piece.start)
            if low < high or not found:  # one at least, which says what the columns are
                found.append(Piece(piece.handle, piece.start + min(low, max(high, 0)), piece.start + max(high, 0)))
            first += piece.stop - piece.start
        found = [piece for piece in found if piece.stop > piece.start] or found[:1]
        padding = max(0, min(stop - start, stop - (len(self) - self.num_padding)))
        return RemoteBatch(self._scheduler, found, padding)

    def __repr__(self) -> str:
        where = dict.fromkeys(piece.handle.worker_id for piece in self._pieces)
        return f"RemoteBatch({len(self)} rows in {', '.join(where)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The codec puts the values in the place of the handles, so the receiver joins rows.
        return _join, ([tuple(piece) for piece in self._pieces], self.num_padding)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()  # and not the copy of its rows that a Batch makes here


def _join(pieces: Sequence[tuple[Any, int, int]], num_padding: int) -> Batch:
    for value, _, _ in pieces:
        if not isinstance(value, Batch):
            raise TypeError(
                f"rows that stay in workers travel as arguments of calls only; this found a {type(value).__qualname__} in "
                "place of a Batch. fetch() them first"
            )
    joined = Batch.concat([value[start:stop].with_padding(0) for value, start, stop in pieces])
    return joined.with_padding(num_padding)


def join_remote(scheduler: Scheduler, batches: Sequence[Batch]) -> RemoteBatch:
    """The rows of several, without moving any. Raises: ValueError, where rows lie behind the padding of others."""
    pieces: list[Piece] = []
    padding = 0
    for index, batch in enumerate(batches):
        assert isinstance(batch, RemoteBatch)
        if padding and batch.num_padding < len(batch):
            raise ValueError(f"batch {index} has rows behind the padding of one before it; unpad first")
        padding += batch.num_padding
        pieces += batch.pieces
    return RemoteBatch(scheduler, pieces, padding)
