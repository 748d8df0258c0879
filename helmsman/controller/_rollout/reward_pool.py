"""RewardPool: runs a user's reward function on workers of any scheduler, with an enforced timeout.

Everything here runs on Helmsman's own event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from helmsman._base.event_loop import run_async, run_sync
from helmsman._wire.codec import Packed, encode_arguments
from helmsman.api.errors import (
    CallTimeoutError,
    HelmsmanError,
    NotFoundError,
    RewardLostError,
    RewardTimeoutError,
    SchedulerClosedError,
    WorkerFailedError,
)
from helmsman.api.forms import run_in_new_thread
from helmsman.api.open_work import Ledger
from helmsman.api.scheduler import Job, Scheduler, Timeouts, Worker
from helmsman.api.supervision import ProbePolicy, Sign, Watch
from helmsman.controller._groups.role_controller import RoleController, blocking
from helmsman.controller._rollout.reward_workers import RewardProcess, RewardWorkers
from helmsman.controller._scheduler.local import LocalScheduler
from helmsman.rpc_server._host.reward import Overtime

_ENGINE = "helmsman.rpc_server._host.reward.RewardEngine"
_GRACE_S = 5.0
"""Extra time after an async function's timeout; without a reply by then, the worker hangs."""
_DEAD_S = 60.0
"""Silence after which a worker is restarted; twice the timeout of a score if that is longer, so
that the timeout applies first.
"""
_SHUTDOWN_S = 2.0
"""Shutdown limit of on_this_machine(); a running score has half of it to end."""


class RewardPool(RoleController):
    """Runs a user's reward function on the workers of one role.

    A score goes to the worker with the fewest scores. When all workers are full, it waits in FIFO
    order; a worker takes one score of a ``def`` function, or ``max_in_flight_per_worker`` of an
    ``async def``. Each score is computed at most once. A score that exceeds ``timeout`` fails
    alone: an async function is cancelled; the worker of a synchronous one is restarted, like a dead
    worker, while the other workers continue.

    Args:
        scheduler: Any scheduler. On the inline scheduler, a score that exceeds its timeout keeps
            running in the background.
        function: ``def`` or ``async def``; picklable, or an import path 'package.module.function'.
        job: The workers, such as ``Job(role="reward", replicas=8)``.
        timeout: Seconds from sending a score to a worker until its result; ``timeouts.call_s``
            when None. Code that blocks a worker's event loop or holds the GIL is detected some
            seconds later.
        max_in_flight_per_worker: Maximum number of concurrent scores of an async function on a
            worker.
        max_restarts: Maximum number of restarts within an hour, of all workers together; beyond it,
            lost workers are not restarted.

    Raises:
        JobError: If the job is invalid.
        ValueError: If a limit is out of range.
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
        """References to running attempts; the event loop holds tasks only weakly."""
        self._owned: Scheduler | None = None
        self.open_scores = Ledger[_ScoreCall]("reward", self.role, scheduler.reporter)
        """Scores that have not ended."""

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
        """Start a pool of processes on this machine; closing it ends them.

        Args:
            function: ``def`` or ``async def``; picklable, or an import path
                'package.module.function'.
            num_processes: Number of worker processes.
            timeout: Seconds from sending a score to a worker until its result; the scheduler's
                default when None.
            max_in_flight_per_worker: Maximum number of concurrent scores of an async function on a
                process.
            max_restarts: Maximum number of restarts within an hour, of all processes together.

        Returns:
            The pool, initialized.

        Raises:
            JobError: If the job is invalid.
            StartError: If a process does not start.
            ValueError: If a limit is out of range.
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
        """Compute one score on a worker.

        The asynchronous form can be awaited on any event loop, also as ``await pool(...)``.
        Cancelling it withdraws a waiting score, and drops the result of a running one.

        Args:
            *args: Positional arguments of the function.
            **kwargs: Keyword arguments of the function.

        Returns:
            The value of ``function(*args, **kwargs)``.

        Raises:
            EngineCallError: If the function raised; with its error and traceback.
            RewardTimeoutError: If the score exceeded ``timeout``.
            RewardLostError: If its worker died.
            RewardWorkersSpentError: If no worker is left.
            ArgumentNotSerializableError: If an argument cannot be sent.
        """
        return await run_async(self._score(self._call(args, kwargs)))

    score = blocking(async_score)
    __call__ = async_score

    async def async_map(self, items: Iterable[Any]) -> list[Any]:
        """Compute the scores of all items, each passed as the only argument.

        Returns:
            The scores, in the order of the items.

        Raises:
            HelmsmanError: The first error in the order of the items, once all have ended; ``score``
                lists the possible errors.
        """
        return await run_async(self._score_all([self._call((item,), {}) for item in items]))

    map = blocking(async_map)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _ScoreCall:
        """Pack arguments in the caller's thread, so that errors precede the wait for a worker."""
        self._check_started()
        return _ScoreCall(
            args, kwargs, Packed(encode_arguments(self.role, "", "score", (args, kwargs)))
        )

    async def _score_all(self, calls: list[_ScoreCall]) -> list[Any]:
        outcomes = await asyncio.gather(*map(self._score, calls), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    async def _score(self, call: _ScoreCall) -> Any:
        self._check_started()
        places = self._places
        assert places is not None
        is_again = False
        while True:
            self.open_scores.queue(call, call)
            try:
                process = await places.acquire(is_again=is_again)
            except BaseException:
                self.open_scores.end(call)
                raise
            self.open_scores.place(call, process.worker_id)
            # A separate task: the score occupies the worker even if its caller is cancelled.
            attempt = asyncio.ensure_future(self._attempt(places, process, call))
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)
            # Retrieved, so that asyncio does not log it.
            attempt.add_done_callback(lambda attempt: attempt.cancelled() or attempt.exception())
            try:
                return await asyncio.shield(attempt)
            except _NotBegunError:
                is_again = True

    async def _attempt(
        self, places: RewardWorkers, process: RewardProcess, call: _ScoreCall
    ) -> Any:
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
            self._check_started()  # Raises the pool's own error if it is closing.
            raise
        finally:
            self.open_scores.end(call)
            places.give_back(process)

    async def _require_alive(self, places: RewardWorkers, process: RewardProcess) -> None:
        """Probe an idle process before sending to it, once for all waiting callers.

        Raise _NotBegunError if it is lost: the unsent score can safely go to another worker.
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
        if process.lost.done():  # Also if another caller detected it.
            raise _NotBegunError

    async def _sent(self, process: RewardProcess, call: _ScoreCall) -> Any:
        method, limit_s, arguments = "score", self.timeout, tuple[Any, ...]((call.packed,))
        if self._is_async:
            method = "async_score"
            limit_s = self.timeout + _GRACE_S
            arguments = (call.packed, self.timeout)
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
        # Retrieved, so that asyncio does not log it.
        work.add_done_callback(lambda work: work.cancelled() or work.exception())
        raise self._lost(process, call, process.lost.result())

    def _lost(self, process: RewardProcess, call: _ScoreCall, reason: str) -> HelmsmanError:
        self._check_started()  # Raises the pool's own error if it is closing.
        return RewardLostError(worker_id=process.worker_id, call=str(call), reason=reason)

    def _answer(self, process: RewardProcess, call: _ScoreCall, answer: Any) -> Any:
        if isinstance(answer, Overtime):
            raise self._overtime(process, call, answer.elapsed_s, "The function was cancelled", "")
        return answer

    def _overtime(
        self, process: RewardProcess, call: _ScoreCall, elapsed_s: float, then: str, stack: str
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
        """Stop the workers; waiting and running scores fail. Idempotent.

        Raises:
            ShutdownIncompleteError: If some workers do not stop in time.
        """
        try:
            super().close()
            if self._places is not None:
                # A restart in progress stops its process when it finds the role deleted.
                run_sync(self._places.settle(self.scheduler.timeouts.shutdown_s))
        finally:
            if self._owned is not None:
                self._owned.close()


class _NotBegunError(Exception):
    """The worker was lost before the score was sent."""


class _ScoreCall:
    """Arguments of one score."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], packed: Packed) -> None:
        self.packed = packed
        self._args, self._kwargs = args, kwargs

    def __repr__(self) -> str:
        shown = [
            *map(reprlib.repr, self._args),
            *(f"{name}={reprlib.repr(value)}" for name, value in self._kwargs.items()),
        ]
        return f"score({', '.join(shown)})"
