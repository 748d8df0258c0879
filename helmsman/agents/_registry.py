"""Registry of a gateway's sessions: names, keys, and finished sessions until they are collected."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helmsman import HelmsmanError
from helmsman.agents._journal import Journal
from helmsman.agents._messages import BadRequestError
from helmsman.agents._session import AgentSession, SessionRecord
from helmsman.api.open_work import Ledger, Open


class OpenSessions(Ledger[AgentSession]):
    """Open sessions with their turns, for the snapshots of a run."""

    has_openers = True

    def open_items(self, most: int | None = None) -> list[Open]:
        """Return the open sessions, oldest first, or as many of them."""
        return [self._described(each) for each in super().open_items(most)]

    def _described(self, item: Open) -> Open:
        session, opener, doing = item.shown, item.task, ""
        assert isinstance(session, AgentSession)
        turn = next(iter(list(session.running)), None)
        task = opener if turn is None else turn
        if task is None or task.done():
            task = None
            doing = f"waits for its agent's next request ({session.num_turns} turns so far)"
        return Open(
            *(item.number, item.since, session.name, task, doing, session.last_used),
            opener=opener,
            is_served=turn is not None,
        )


class Registry:
    """Sessions by key, and the finished sessions of outside agents."""

    def __init__(
        self,
        open_session: Callable[[str | None, Mapping[str, Any], str], AgentSession],
        journal: Journal | None,
        key: str,
        max_pending: int | None,
        outside_timeout: float,
    ) -> None:
        self.key = key
        self.journal = journal
        self._open, self._max_pending = open_session, max_pending
        self._outside_timeout = outside_timeout
        self._lock = threading.Lock()
        self._by_key: dict[bytes, AgentSession] = {}
        self._names: set[str] = set()
        self._changed = asyncio.Condition()
        self._finished = collections.deque(
            record for record in (journal.all() if journal else ()) if record.is_outside
        )
        self._is_closed = False
        self.inside = OpenSessions("session", "the script")
        self.outside = OpenSessions("outside session", "")

    def add(self, session: AgentSession) -> None:
        """Add an open session.

        Raises:
            ValueError: An open session has its name.
            BadRequestError: The name has a lone surrogate.
            HelmsmanError: The gateway is closed.
        """
        with self._lock:
            if self._is_closed:
                raise HelmsmanError("the gateway is closed; make a new one")
            _check_name(session.name)
            if session.name in self._names:
                raise ValueError(f"session {session.name!r} is already open; choose another name")
            self._names.add(session.name)
            self._by_key[_digest(session.key)] = session
        if session.is_outside:
            self.outside.begin(session, session)
        else:
            self.inside.begin(session, session, _current_task())

    def find(self, session_id: str | None, key: str) -> AgentSession | None:
        """Return the session that a key opens."""
        session = self._by_key.get(_digest(key))
        return session if session is not None and session_id in (None, session.id) else None

    def knows(self, key: str) -> bool:
        """Return whether a key is the gateway's or an open session's."""
        return self.find(None, key) is not None or self.opens_sessions(key)

    def opens_sessions(self, key: str) -> bool:
        """Return whether a key is the gateway's."""
        return hmac.compare_digest(_digest(key), _digest(self.key))

    def open_outside(self, name: str | None, metadata: Mapping[str, Any], url: str) -> AgentSession:
        """Open a session for an outside agent, which reaches the gateway by a URL.

        Raises:
            BadRequestError: The name is in use, or sessions are ahead of the training.
        """
        outside = [each for each in self.open_sessions() if each.is_outside]
        for session in outside:
            if time.monotonic() - session.last_used > self._outside_timeout and not session.running:
                session.close(is_complete=False)
        num_pending = sum(not each.is_closed for each in outside) + len(self._finished)
        if self._max_pending is not None and num_pending >= self._max_pending:
            raise BadRequestError(
                f"{num_pending} sessions of outside agents are open or not yet collected; the "
                f"limit is {self._max_pending}; try again when the trainer has collected some",
                code="rate_limit_exceeded",
                status=429,
            )
        _check_name(name)
        if name in self._names or (
            name is not None and self.journal is not None and self.journal.get(name) is not None
        ):
            raise BadRequestError(
                f"session {name!r:.80} is already open or finished; choose another name",
                "name",
                code="name_in_use",
            )
        return self._open(name, metadata, url)

    def end(self, session: AgentSession, is_complete: bool) -> None:
        """Remove a closed session, and keep it if it is complete.

        Raises:
            OSError: The journal cannot be written.
        """
        with self._lock:
            self._by_key.pop(_digest(session.key), None)
            self._names.discard(session.name)
        (self.outside if session.is_outside else self.inside).end(session)
        journal = self.journal if session.is_kept else None
        if is_complete and (session.is_outside or journal is not None):
            record = session.record()
            if session.is_outside:
                self._finished.append(record)
            if journal is not None:
                journal.add(record)

    async def collect(self, num_sessions: int) -> None:
        """Wait, on the gateway's loop, until so many sessions are finished.

        Raises:
            HelmsmanError: The gateway is closed.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_closed or len(self._finished) >= num_sessions
            )
        if self._is_closed:
            raise HelmsmanError("the gateway was closed while collect() waited for sessions")

    def ready(self) -> tuple[int, str]:
        """Return the number of finished sessions, and why there are no others."""
        ended = self.outside.finished()[0]
        remark = f"{ended} sessions of outside agents have ended so far" if ended else ""
        return len(self._finished), remark or "no outside agent has opened a session"

    async def announce(self) -> None:
        """Wake the callers that wait in ``collect``."""
        async with self._changed:
            self._changed.notify_all()

    def take(self, num_sessions: int) -> list[SessionRecord] | None:
        """Return the first finished sessions; None if there are fewer."""
        with self._lock:
            if len(self._finished) < num_sessions:
                return None
            return [self._finished.popleft() for _ in range(num_sessions)]

    def open_sessions(self) -> Sequence[AgentSession]:
        """Return the open sessions."""
        with self._lock:
            return list(self._by_key.values())

    def close(self) -> None:
        """Close all sessions, and refuse further ones. Idempotent."""
        with self._lock:
            self._is_closed = True
        for session in self.open_sessions():
            session.close(is_complete=False)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return None


def _check_name(name: str | None) -> None:
    if name is not None and name.encode(errors="replace").decode() != name:
        raise BadRequestError(
            f"the session's name is {name[:40]!a}, which has a lone surrogate; choose another name",
            "name",
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
