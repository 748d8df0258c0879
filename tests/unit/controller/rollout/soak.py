"""Soak test of GenerateScheduler in virtual time: random faults of instances, drawn from a seed."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence

from helmsman.api.errors import InstanceLostError
from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.request import RequestOptions, RequestState, Ticket
from helmsman.controller._rollout.request_api import samples_of
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.testing import (
    EngineModel,
    SimulatedBackend,
    SimulatedInstance,
    log_normal_lengths,
    run_virtually,
)
from tests.unit.controller.rollout.invariants import end_of

NUM_INSTANCES = 8
CAPACITY = 16
MAX_NEW_TOKENS = 400
LENGTHS = log_normal_lengths(seed=5, mean=80.0, sigma=1.0)
MODEL = EngineModel(step_s=0.02, per_request_s=0.0005, prefill_s=0.0005)


def now() -> float:
    return asyncio.get_running_loop().time()


class Engine(SimulatedInstance):
    """Instance that records its weight versions over time and may stop answering."""

    def __init__(self, instance_id: str, version: int) -> None:
        super().__init__(instance_id, MODEL, LENGTHS, version)
        self.weights = [(now(), version)]
        """Time and version of each update."""
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_gone = False
        """Whether its process has ended; its pending answers are lost then."""

    def end(self) -> None:
        self.kill("its process was ended")
        self.is_gone = True
        self.answers.set()

    def update(self, version: int) -> None:
        self.version = version
        self.weights.append((now(), version))

    def may_have_made(self, begin: float, end: float) -> set[int]:
        """Return the versions that it had between two times."""
        until = [at for at, _ in self.weights[1:]] + [end]
        return {
            version
            for (at, version), next_ in zip(self.weights, until, strict=True)
            if at <= end and next_ >= begin
        }


class Engines(SimulatedBackend):
    """Checks each answer; an instance that hangs answers late or never."""

    def __init__(self) -> None:
        super().__init__({})
        self.num_calls = self.num_late = 0

    def engine(self, instance_id: str) -> Engine:
        engine = self.instances.get(instance_id)
        if engine is None:
            raise InstanceLostError(
                instance_id=instance_id, reason="it has left", may_have_begun=False
            )
        assert isinstance(engine, Engine)
        return engine

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        engine, begin = self.engine(instance_id), now()
        self.num_calls += 1
        result = await engine.generate(request)
        assert len(result.versions) == len(result.token_ids)
        assert result.versions == sorted(result.versions)
        assert set(result.versions) <= engine.may_have_made(begin, now())
        if not engine.answers.is_set():
            await self.answered(engine)
            self.num_late += 1
        return result

    async def abort(self, instance_id: str, request_ids: Sequence[str]) -> None:
        engine = self.engine(instance_id)
        await self.answered(engine)
        engine.abort(request_ids)

    async def answered(self, engine: Engine) -> None:
        await engine.answers.wait()
        if engine.is_gone:
            raise InstanceLostError(
                instance_id=engine.instance_id, reason="its process was ended", may_have_begun=True
            )


class Soak:
    """One run.

    Args:
        seed: Seed of all random draws.
        num: Number of requests.
        on_quarter: Called each time that a quarter of the requests has ended.
    """

    def __init__(self, seed: int, num: int, on_quarter: Callable[[], None]) -> None:
        self.random, self.num, self.on_quarter = random.Random(seed), num, on_quarter
        self.backend = Engines()
        self.scheduler = GenerateScheduler(
            self.backend, retries=RetryGeneration(20), max_in_flight=100, max_queue=200
        )
        self.version = 0
        self.ids = 0
        self.open: dict[str, Ticket] = {}
        self.ends: Counter[RequestState] = Counter()
        self.all_ended = asyncio.Event()
        self.digest = hashlib.sha256()
        self.happened: Counter[str] = Counter()
        self.background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        for _ in range(NUM_INSTANCES):
            self.join()
        chaos = asyncio.create_task(self.chaos())
        number = 0
        while number < self.num:
            request = GenerationRequest(
                request_id=f"r{number}",
                prompt_ids=[1] * 8,
                sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
            )
            options = RequestOptions(
                priority=self.random.choice((0, 0, 0, 1)),
                deadline_s=self.random.uniform(1.0, 60.0) if self.random.random() < 0.1 else None,
            )
            num_samples = min(self.random.choice((1,) * 9 + (6,)), self.num - number)
            tickets = (
                [await self.scheduler.submit(request, options)]
                if num_samples == 1
                else self.put(request, options, num_samples)
            )
            for ticket in tickets:
                self.open[ticket.request_id] = ticket
                ticket.future.add_done_callback(lambda _, ticket=ticket: self.ended(ticket))  # type: ignore[misc]
                if self.random.random() < 0.01:
                    ticket.future.cancel()
            number += num_samples
        await self.all_ended.wait()
        for task in [chaos, *self.background]:
            task.cancel()
        for outcome in await asyncio.gather(chaos, *self.background, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome

    def put(
        self, request: GenerationRequest, options: RequestOptions, num_samples: int
    ) -> list[Ticket]:
        return self.scheduler.put(samples_of(request, num_samples), options, together=num_samples)

    def ended(self, ticket: Ticket) -> None:
        """Record and check the end of a request.

        The end is derived from the future: a cancelled request gets its state a turn later.
        """
        del self.open[ticket.request_id]
        future = ticket.future
        length = min(LENGTHS(ticket.request), MAX_NEW_TOKENS)
        state = end_of(future, length, range(self.version + 1))
        if not future.cancelled():
            assert ticket.state is state
        has_result = not future.cancelled() and future.exception() is None
        versions = future.result().versions if has_result else []
        self.ends[state] += 1
        self.digest.update(
            f"{ticket.request_id} {state} {ticket.num_attempts} {ticket.sent_to} {versions} "
            f"{now()!r}\n".encode()
        )
        if self.ends.total() % (self.num // 4) == 0:
            self.on_quarter()
        if self.ends.total() == self.num:
            self.all_ended.set()

    # --- events -----------------------------------------------------------------------------------

    async def chaos(self) -> None:
        kinds = [
            self.kill,
            self.hang,
            self.abort_some,
            self.suspend,
            self.leave,
            self.leave,
            self.update,
            self.update,
        ]
        while True:
            await asyncio.sleep(self.random.expovariate(1.0))
            kind = self.random.choice(kinds)
            self.happened[kind.__name__] += 1
            task = asyncio.create_task(kind())
            self.background.add(task)
            task.add_done_callback(self.discard)

    def discard(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self.background.discard(task)

    def some_instance(self) -> str:
        return self.random.choice(list(self.scheduler.instances))

    def is_up(self, instance_id: str) -> bool:
        instance = self.scheduler.instances.get(instance_id)
        return instance is not None and instance.is_serving

    def join(self) -> None:
        self.ids += 1
        instance_id = f"i{self.ids}"
        self.backend.instances[instance_id] = Engine(instance_id, self.version)
        self.scheduler.add(instance_id, CAPACITY)

    async def rebuild(self, instance_id: str) -> None:
        """Restart a dead instance, unless it was removed meanwhile."""
        for health in (Health.RESTARTING, Health.STALE):
            await asyncio.sleep(self.random.uniform(0.5, 5.0))
            if instance_id not in self.scheduler.instances:
                return
            if health is Health.RESTARTING:
                self.backend.engine(instance_id).end()
            else:
                self.backend.instances[instance_id] = Engine(instance_id, version=-1)
            self.scheduler.set_health(instance_id, health)
        self.backend.engine(instance_id).update(self.version)
        self.scheduler.set_health(instance_id, Health.HEALTHY)

    async def kill(self) -> None:
        if self.is_up(instance_id := self.some_instance()):
            self.backend.engine(instance_id).kill()
            await asyncio.sleep(self.random.choice((0.0, 0.3)))
            if instance_id in self.scheduler.instances:
                self.scheduler.set_health(instance_id, Health.DEAD)
                await self.rebuild(instance_id)

    async def hang(self) -> None:
        if not self.is_up(instance_id := self.some_instance()):
            return
        engine = self.backend.engine(instance_id)
        engine.answers.clear()
        await asyncio.sleep(3.0)
        for health in (Health.SUSPECT, Health.DEAD):
            if self.backend.instances.get(instance_id) is not engine:
                engine.end()
                return
            self.scheduler.set_health(instance_id, health)
            await asyncio.sleep(3.0)
        if self.random.random() < 0.7:
            engine.answers.set()
        await self.rebuild(instance_id)

    async def abort_some(self) -> None:
        chosen = self.random.sample(list(self.open), min(len(self.open), 30))
        if self.random.random() < 0.05:
            await asyncio.wait_for(self.scheduler.abort(), 60.0)
        else:
            await asyncio.wait_for(self.scheduler.abort(chosen), 60.0)

    async def suspend(self) -> None:
        if self.scheduler.is_suspended:
            return
        self.scheduler.suspend()
        num_calls = self.backend.num_calls
        if self.random.random() < 0.5:
            await asyncio.wait_for(self.scheduler.take_back(), 60.0)
            self.happened["recall"] += 1
            assert self.scheduler.num_in_flight == 0
        await asyncio.wait_for(self.scheduler.wait_idle(), 60.0)
        await asyncio.sleep(0.5)
        assert self.backend.num_calls == num_calls
        self.scheduler.resume()

    async def leave(self) -> None:
        """Replace an instance, or keep it if its drain is given up."""
        if not self.is_up(instance_id := self.some_instance()):
            return
        drained = self.scheduler.drain(instance_id, migrate=self.random.random() < 0.7)
        try:
            await asyncio.wait_for(drained, self.random.choice((0.2, 30.0)))
        except TimeoutError:
            self.happened["drains given up"] += 1
            return
        self.scheduler.remove(instance_id)
        del self.backend.instances[instance_id]
        self.join()

    async def update(self) -> None:
        self.version += 1
        for instance_id, instance in self.scheduler.instances.items():
            if instance.health in (Health.HEALTHY, Health.SUSPECT):
                self.backend.engine(instance_id).update(self.version)


def run_soak(seed: int, num: int, on_quarter: Callable[[], None] = lambda: None) -> Soak:
    async def main() -> Soak:
        soak = Soak(seed, num, on_quarter)
        async with asyncio.timeout(1e6):
            await soak.run()
        return soak

    return run_virtually(main())


def check_soak(soak: Soak) -> None:
    """Check that each request has ended once and that nothing is left over."""
    assert soak.ends.total() == soak.num
    assert set(soak.ends) == {
        RequestState.DONE,
        RequestState.PARTIAL,
        RequestState.ABORTED,
        RequestState.FAILED,
    }
    assert soak.ends[RequestState.DONE] > 0.6 * soak.num
    assert (soak.scheduler.num_queued, soak.scheduler.num_in_flight, soak.scheduler.running()) == (
        0,
        0,
        {},
    )
    for instance in soak.scheduler.instances.values():
        assert (instance.num_in_flight, instance.outstanding_tokens) == (0, 0)
    assert len(soak.scheduler.instances) == NUM_INSTANCES
    print(
        dict(soak.ends),
        dict(soak.happened),
        f"{soak.version} updates, {soak.backend.num_late} late answers",
    )
