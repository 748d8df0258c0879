"""RewardPool: a user's reward function on workers of any scheduler, with a limit of time that
holds.

All of it runs on Helmsman's own event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import reprlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from helmsman.api.errors import (
    CallTimeoutError,
    HelmsmanError,
    NotFoundError,
    RewardLostError,
    RewardTimeoutError,
    RewardWorkersSpentError,
    SchedulerClosedError,
    WorkerFailedError,
)
from helmsman.api.forms import run_in_new_thread
from helmsman.api.scheduler import Job, Scheduler, Timeouts, Worker
from helmsman.api.supervision import ProbePolicy, Report, RestartBudget, Sign, Watch
from helmsman.controller._aio.event_loop import run_async, run_sync
from helmsman.controller._roles.role_controller import RoleController, blocking
from helmsman.controller._schedulers.local import LocalScheduler
from helmsman.rpc_server._host.reward import Overtime
from helmsman.rpc_server._wire.codec import Packed, encode_arguments

log = logging.getLogger(__name__)

_RESTART_WINDOW_S = 3600.0
_PAUSE_S = 0.1
"""After a restart that failed; doubled with each more."""
_MAX_PAUSE_S = 30.0
"""Or the budget of an hour would never be spent, and what waits for a worker would never be
told.
"""


class Process:
    """A worker's process, until it is lost."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.num_in_flight = 0
        self.num_sent = 0
        """Scores that it has been sent and that have not ended."""
        self.last_turn = -1
        self.alive: asyncio.Task[Report] | None = None
        """The question whether it lives, while it has been sent nothing."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when it is gone."""


class RewardWorkers:
    """Gives out places at workers, of which each has ``capacity``, and restarts those that are
    lost: by ``rebuild``, which raises when it cannot, and at most ``max_restarts`` of all together
    within an hour.
    """

    def __init__(
        self,
        role: str,
        worker_ids: Iterable[str],
        capacity: int,
        max_restarts: int,
        rebuild: Callable[[str], Awaitable[None]],
    ) -> None:
        self._role, self._capacity, self._max_restarts, self._rebuild = (
            role,
            capacity,
            max_restarts,
            rebuild,
        )
        self._processes: dict[str, Process | None] = {
            worker_id: Process(worker_id) for worker_id in worker_ids
        }
        """By worker; None where it is lost."""
        self._coming_back: set[str] = set()
        self._queue: collections.deque[asyncio.Future[Process]] = collections.deque()
        """Of those that wait for a place; some wait no more."""
        self._turns = itertools.count()
        self._budget = RestartBudget(max_restarts, _RESTART_WINDOW_S)
        self._restarts: set[asyncio.Task[None]] = set()
        self._last_reason = ""
        self._closed: HelmsmanError | None = None
        """Why no place is given out any more."""

    # --- places -----------------------------------------------------------------------------------

    async def acquire(self, *, is_again: bool) -> Process:
        """A place at the worker that has the fewest scores, in the order of asking; who was sent in
        vain comes first. Raises: RewardWorkersSpentError when no worker is left; what close was
        given.
        """
        if self._closed is not None:
            raise self._closed
        place: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        if is_again:
            self._queue.appendleft(place)
        else:
            self._queue.append(place)
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:  # it came at the same time
                self.give_back(place.result())
            raise

    def give_back(self, process: Process) -> None:
        process.num_in_flight -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        processes = [process for process in self._processes.values() if process is not None]
        while self._queue:
            if self._queue[0].done():  # cancelled
                self._queue.popleft()
                continue
            free = [process for process in processes if process.num_in_flight < self._capacity]
            if not free:
                break
            process = min(free, key=lambda each: (each.num_in_flight, each.last_turn))
            process.num_in_flight += 1
            process.last_turn = next(self._turns)
            self._queue.popleft().set_result(process)
        if self._queue and not processes and not self._coming_back:
            self._fail_waiting(
                RewardWorkersSpentError(
                    role=self._role,
                    num_workers=len(self._processes),
                    max_restarts=self._max_restarts,
                    window_s=_RESTART_WINDOW_S,
                    reason=self._last_reason,
                )
            )

    def _fail_waiting(self, error: HelmsmanError) -> None:
        while self._queue:
            if not (place := self._queue.popleft()).done():
                place.set_exception(error)

    # --- losses -----------------------------------------------------------------------------------

    def on_report(self, report: Report) -> None:
        if report.sign is Sign.DEAD and (process := self._processes[report.worker_id]) is not None:
            self.lose(process, report.reason)

    def lose(self, process: Process, reason: str) -> None:
        """A process is gone, or of no use: what it has fails, and another is started in its place.
        Idempotent.
        """
        if process.lost.done():
            return
        worker_id = process.worker_id
        log.warning("%s: %s", worker_id, reason)
        self._last_reason = reason
        self._processes[worker_id] = None
        self._coming_back.add(worker_id)
        process.lost.set_result(reason)
        task = asyncio.ensure_future(self._restart(worker_id))
        self._restarts.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, worker_id: str) -> None:
        pause_s = _PAUSE_S
        while (
            self._closed is None
            and self._budget.spend(asyncio.get_running_loop().time()) is not None
        ):
            try:
                await self._rebuild(worker_id)
            # Whatever it is, the worker is not there, and the budget decides
            except Exception as error:  # noqa: BLE001
                if self._closed is None:
                    log.warning("%s could not be restarted: %s", worker_id, error)
                    self._last_reason = f"it could not be restarted: {error}"
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                self._processes[worker_id] = Process(worker_id)
                break
        self._coming_back.discard(worker_id)
        self._hand_out()

    # --- end --------------------------------------------------------------------------------------

    def close(self, error: HelmsmanError) -> None:
        self._closed = error
        self._fail_waiting(error)
        for process in self._processes.values():
            if process is not None and not process.lost.done():
                process.lost.set_result(str(error))

    async def settle(self, limit_s: float) -> None:
        """Wait for restarts that were under way when it was closed."""
        if self._restarts:
            await asyncio.wait(list(self._restarts), timeout=limit_s)


_ENGINE = "helmsman.rpc_server._host.reward.RewardEngine"
_GRACE_S = 5.0
"""How much later than an async function's limit its worker's silence means that the worker
hangs.
"""
_DEAD_S = 60.0
"""A worker that is silent for so long, or for twice the limit of a score, is restarted; the limit
itself comes first.
"""
_SHUTDOWN_S = 2.0
"""A score that runs when the pool of this machine is closed has half of it to end."""


class RewardPool(RoleController):
    """Scores by a user's function, on the workers of one role.

    A score goes to the worker that has the fewest, or waits in order while all have as many as they
    take: one of a ``def`` function, ``max_in_flight_per_worker`` of an ``async def``. Each is
    computed once, at most. One that takes too long fails alone: an async function is cancelled, and
    the worker of a synchronous one is restarted, as one that has died is, while the others go on.

    Args:
        scheduler: of any kind. On the inline scheduler what takes too long is left to run beside
            the script.
        function: ``def`` or ``async def``; picklable, or an import path 'package.module.function'.
        job: the workers, such as ``Job(role="reward", replicas=8)``.
        timeout: seconds from sending a score to a worker until its result; ``timeouts.call_s``
            when None. What blocks a worker's event loop, or holds the interpreter's lock, is
            noticed some seconds later.
        max_in_flight_per_worker: scores that run at once on a worker, of an async function.
        max_restarts: of all workers together, within an hour; beyond them a worker that is lost
            stays so.
    """

    _ready_methods = ()

    def __init__(
        self,
        scheduler: Scheduler,
        function: str | Callable[..., Any],
        job: Job,
        timeout: float | None = None,
        *,
        max_in_flight_per_worker: int = 64,
        max_restarts: int = 64,
    ) -> None:
        super().__init__(scheduler, _ENGINE, job, (function,))
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout:g}; expected seconds above 0, or None")
        for name, value, least in (
            ("max_in_flight_per_worker", max_in_flight_per_worker, 1),
            ("max_restarts", max_restarts, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; expected {least} or more")
        self.timeout = scheduler.timeouts.call_s if timeout is None else timeout
        self._max_in_flight, self._max_restarts = max_in_flight_per_worker, max_restarts
        self._is_async = False
        self._places: RewardWorkers | None = None
        self._watch: Watch | None = None
        self._attempts: set[asyncio.Task[Any]] = set()
        """The event loop itself holds tasks only weakly."""
        self._owned: Scheduler | None = None

    @classmethod
    def on_this_machine(
        cls,
        function: str | Callable[..., Any],
        num_processes: int = 4,
        timeout: float | None = None,
        *,
        max_in_flight_per_worker: int = 64,
        max_restarts: int = 64,
    ) -> Self:
        """A pool of processes of this machine, started, that ends them when it is closed. Raises:
        as initialize.
        """
        scheduler = LocalScheduler(
            num_gpus=0, preload=(), timeouts=Timeouts(shutdown_s=_SHUTDOWN_S)
        )
        try:
            pool = cls(
                scheduler,
                function,
                Job(role="reward", replicas=num_processes),
                timeout,
                max_in_flight_per_worker=max_in_flight_per_worker,
                max_restarts=max_restarts,
            )
            pool._owned = scheduler
            pool.initialize()
        except BaseException:
            scheduler.close()
            raise
        return pool

    # --- scores -----------------------------------------------------------------------------------

    async def async_score(self, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` on a worker; may be awaited on any event loop, and as
        ``await pool(...)``.

        When the await is cancelled, a score that waits is withdrawn, and the result of one that
        runs is dropped.

        Raises: EngineCallError, what the function raised, with its traceback; RewardTimeoutError;
            RewardLostError (its worker died); RewardWorkersSpentError (no worker is left);
            ArgumentNotSerializableError.
        """
        return await run_async(self._score(self._call(args, kwargs)))

    score = blocking(async_score)
    __call__ = async_score

    async def async_map(self, items: Iterable[Any]) -> list[Any]:
        """The scores of all items, in their order.

        Raises:
            HelmsmanError: The first error in their order, as from ``score``, once all have ended.
        """
        return await run_async(self._score_all([self._call((item,), {}) for item in items]))

    map = blocking(async_map)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        """Packed here, in the caller's thread: what cannot be sent fails before it waits."""
        self._check_started()
        return _Call(args, kwargs, Packed(encode_arguments(self.role, "", "score", (args, kwargs))))

    async def _score_all(self, calls: list[_Call]) -> list[Any]:
        outcomes = await asyncio.gather(*map(self._score, calls), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    async def _score(self, call: _Call) -> Any:
        self._check_started()
        places = self._places
        assert places is not None
        is_again = False
        while True:
            process = await places.acquire(is_again=is_again)
            # A task of its own: a worker has what it was sent, also when its caller waits no
            # longer.
            attempt = asyncio.ensure_future(self._attempt(places, process, call))
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)
            # seen, by somebody or not
            attempt.add_done_callback(lambda attempt: attempt.cancelled() or attempt.exception())
            try:
                return await asyncio.shield(attempt)
            except _NotBegunError:
                is_again = True

    async def _attempt(self, places: RewardWorkers, process: Process, call: _Call) -> Any:
        try:
            await self._require_alive(places, process)
            return self._answer(process, call, await self._sent(process, call))
        except CallTimeoutError as error:
            places.lose(
                process, f"a score did not end within {error.elapsed_s:.2f} s, so it is restarted"
            )
            raise self._overtime(
                process, call, error.elapsed_s, "The worker is restarted", error.stack
            ) from error
        except WorkerFailedError as error:
            reason = f"process {error.pid} {error.cause}"
            places.lose(process, reason)
            raise self._lost(process, call, reason) from error
        except (NotFoundError, SchedulerClosedError):
            self._check_started()  # a pool that is being closed says so
            raise
        finally:
            places.give_back(process)

    async def _require_alive(self, places: RewardWorkers, process: Process) -> None:
        """Ask a process that has been sent nothing, once for all who wait: a score that it was
        never sent goes elsewhere.
        """
        if not process.num_sent:
            if process.alive is None:
                ask = self.scheduler.monitor.ask(
                    process.worker_id, self.scheduler.timeouts.health_s
                )
                process.alive = asyncio.ensure_future(ask)
            report = await asyncio.shield(process.alive)
            if report.sign is Sign.DEAD:
                places.lose(process, report.reason)
            process.alive = None
        if process.lost.done():  # noticed just now, or by another meanwhile
            raise _NotBegunError

    async def _sent(self, process: Process, call: _Call) -> Any:
        method, limit_s, arguments = "score", self.timeout, tuple[Any, ...]((call.packed,))
        if self._is_async:
            method, limit_s, arguments = (
                "async_score",
                self.timeout + _GRACE_S,
                (call.packed, self.timeout),
            )
        process.num_sent += 1
        try:
            sent = self.scheduler.async_call_engine(
                process.worker_id, method, None, *arguments, rpc_timeout=limit_s
            )
            work = asyncio.ensure_future(sent)
            await asyncio.wait([work, process.lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            process.num_sent -= 1
        if work.done():
            return work.result()
        work.cancel()
        # retrieved, so that asyncio does not log it
        work.add_done_callback(lambda work: work.cancelled() or work.exception())
        raise self._lost(process, call, process.lost.result())

    def _lost(self, process: Process, call: _Call, reason: str) -> HelmsmanError:
        self._check_started()  # as above
        return RewardLostError(worker_id=process.worker_id, call=str(call), reason=reason)

    def _answer(self, process: Process, call: _Call, answer: Any) -> Any:
        if isinstance(answer, Overtime):
            raise self._overtime(process, call, answer.elapsed_s, "The function was cancelled", "")
        return answer

    def _overtime(
        self, process: Process, call: _Call, elapsed_s: float, then: str, stack: str
    ) -> RewardTimeoutError:
        return RewardTimeoutError(
            worker_id=process.worker_id,
            call=str(call),
            elapsed_s=elapsed_s,
            limit_s=self.timeout,
            then=then,
            stack=stack,
        )

    # --- life -------------------------------------------------------------------------------------

    async def _make_ready(self, workers: Sequence[Worker], ranks: Sequence[int]) -> None:
        await super()._make_ready(workers, ranks)
        limit_s = self.scheduler.timeouts.create_engine_s
        self._is_async = await self.scheduler.async_call_engine(
            workers[ranks[0]].id, "is_async", None, rpc_timeout=limit_s
        )

    def _on_started(self) -> None:
        async def start() -> None:
            ids = [worker.id for worker in self._workers]
            capacity = self._max_in_flight if self._is_async else 1
            self._places = RewardWorkers(
                self.role, ids, capacity, self._max_restarts, self._rebuild
            )
            policy = ProbePolicy(dead_s=max(_DEAD_S, 2 * self.timeout))
            self._watch = Watch(self.scheduler.monitor, policy, self._places.on_report, ids)

        run_sync(start())

    async def _rebuild(self, worker_id: str) -> None:
        await run_in_new_thread(self.scheduler.restart_worker, worker_id)
        rank = [worker.id for worker in self._workers].index(worker_id)
        await self._make_ready(self._workers, [rank])
        if self._watch is not None:
            self._watch.add(worker_id)

    def _on_closing(self) -> None:
        places, watch = self._places, self._watch
        assert places is not None
        assert watch is not None

        async def end() -> None:
            watch.close()
            places.close(
                HelmsmanError(f"the reward pool of role {self.role!r} was closed.", role=self.role)
            )

        run_sync(end())

    def close(self) -> None:
        """End the workers; what waits or runs fails. Idempotent. Raises:
        ShutdownIncompleteError.
        """
        try:
            super().close()
            if self._places is not None:
                # a process whose start was under way is ended when that sees that its role is gone
                run_sync(self._places.settle(self.scheduler.timeouts.shutdown_s))
        finally:
            if self._owned is not None:
                self._owned.close()


class _NotBegunError(Exception):
    """The worker was gone before it was sent anything."""


class _Call:
    """What is to be scored."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], packed: Packed) -> None:
        self.packed = packed
        self._args, self._kwargs = args, kwargs

    def __str__(self) -> str:
        shown = [
            *map(reprlib.repr, self._args),
            *(f"{name}={reprlib.repr(value)}" for name, value in self._kwargs.items()),
        ]
        return f"score({', '.join(shown)})"
