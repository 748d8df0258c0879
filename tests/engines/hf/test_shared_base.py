"""Test several policies on the base model of one engine."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helmsman import InlineScheduler, Job, RolloutController, SchedulingStrategy
from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import EngineDeadError, GroupCallError
from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams
from helmsman.api.weights import MemoryTarget, WeightFormat
from helmsman.api.workers import WorkerContext, within
from helmsman.engines._hf.decode_loop import DecodeLoop
from helmsman.engines.rollout import HFRolloutEngine
from helmsman.engines.shared_base import another_policy
from helmsman.engines.train import FSDPTrainEngine
from helmsman.engines.weights import apply_weights
from tests.engines.small_models import GEMMA3_MIXED, LLAMA, MIXTRAL, QWEN2, random_tokens

ANOTHER = "helmsman.engines.shared_base.another_policy"
Adding = Callable[[Any], Any]
LONG = SamplingParams(max_new_tokens=40)
MODEL_TYPE = operator.itemgetter("model_type")
FIELDS: dict[str, Any] = {"max_model_len": 1024, "max_concurrency": 4}


@pytest.fixture
def add(on_the_host: None) -> Iterator[Adding]:
    """Return a function that adds an engine, which is destroyed at the end."""
    added: list[Any] = []

    def build(engine: Any) -> Any:
        added.append(engine)
        engine.initialize()
        return engine

    yield build
    for engine in reversed(added):
        engine.destroy()


def trainer_of(add: Adding, model: Any, seed: int, **lora: Any) -> FSDPTrainEngine:
    """Return a trainer whose adapter has learned something of its own."""
    engine = FSDPTrainEngine(model=model, lr=1e-2, lora={"alpha": 8.0, **lora})
    engine.create_process_group()
    add(engine)
    learn(engine, seed)
    return engine


def learn(engine: FSDPTrainEngine, seed: int) -> None:
    engine.train_batch([{"input_ids": random_tokens(20, seed=seed)} for _ in range(4)], "sft")


def adapter(engine: FSDPTrainEngine) -> Any:
    target = MemoryTarget(version=engine.get_version())
    return engine.publish_weights(target, WeightFormat(adapters=True))


def require(trainer: FSDPTrainEngine, result: GenerationResult, prompt: list[int]) -> None:
    """Require the log-probabilities of a policy."""
    (row,) = trainer.forward([{"input_ids": [*prompt, *result.token_ids]}])
    found = torch.tensor(result.logprobs)
    torch.testing.assert_close(found, row[len(prompt) :], atol=1e-4, rtol=1e-4)


async def generate(engine: Any, seed: int) -> tuple[GenerationResult, list[int]]:
    prompt = random_tokens(5, seed=seed)
    asked = GenerationRequest(request_id="same", prompt_ids=prompt, sampling=LONG)
    return await engine.agenerate(asked), prompt


@pytest.mark.parametrize("model", [QWEN2, GEMMA3_MIXED, MIXTRAL], ids=MODEL_TYPE)
async def test_each_policy_is_its_trainers(add: Adding, model: Any, tmp_path: Path) -> None:
    """Two policies and the base: each has its trainer's log-probabilities, and its own version."""
    folder = str(tmp_path)
    base = FSDPTrainEngine(model=model, seed=3)
    base.create_process_group()
    add(base).export_hf(folder)
    first = add(HFRolloutEngine(model=folder, **FIELDS))
    second, third = first.beside(), first.beside()
    parameters = [dict(each._loop._model.named_parameters()) for each in (first, second, third)]
    for name, tensor in parameters[0].items():
        assert all(each[name] is tensor for each in parameters)
    ends = "experts.", ["experts.down_proj", "v_proj"]
    experts, targets = ends if model is MIXTRAL else ("", "all-linear")
    one = trainer_of(add, folder, 1, rank=2, targets=["q_proj", f"{experts}down_proj"])
    other = trainer_of(add, folder, 2, rank=5, targets=targets)
    learn(other, 7)
    await first.update_weights(adapter(one), 1)
    await second.update_weights(adapter(other), 2)
    await first.update_weights(adapter(one), 3)
    engines = {first: one, second: other, third: base}
    results = await asyncio.gather(*(generate(each, 4) for each in engines))
    for (engine, trainer), version, (result, prompt) in zip(
        engines.items(), (3, 2, 0), results, strict=True
    ):
        assert (engine.get_version(), set(result.versions)) == (version, {version})
        require(trainer, result, prompt)
    third.destroy()
    second.destroy()
    require(one, *await generate(first, 5))
    await first.update_weights(base.export_weights(), 4)  # alone, it takes a whole model again
    require(base, *await generate(first, 5))


def no_memory(*args: Any, **kwargs: Any) -> None:
    """Fail as the allocation of a cache on a full device."""
    raise torch.OutOfMemoryError("the device is full")


async def test_policies_beside_refused(
    add: Adding, on_the_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = add(HFRolloutEngine(model=LLAMA, **FIELDS))
    whole = {name: each.clone() for name, each in first._loop._model.state_dict().items()}
    second = first.beside()
    for engine in (first, second):
        with pytest.raises(
            ValueError, match=r"a whole model would change the base model of .*e, W"
        ):
            await engine.update_weights(whole, 1)
        with pytest.raises(ValueError, match=r"^sleep\(\) would change .* and let no policy sleep"):
            await engine.sleep()
    second.destroy()
    with monkeypatch.context() as full:
        full.setattr("helmsman.engines.rollout.DecodeBatch", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="is full"):
            first.beside()
    with pytest.raises(ValueError, match="which is unchanged. 1 unexpected: unknown"):
        await first.update_weights({**whole, "unknown": torch.ones(1)}, 1)
    first.beside().destroy()  # neither has changed the base model, or left a policy
    with monkeypatch.context() as meanwhile:
        begun, joins, share = threading.Event(), threading.Event(), DecodeLoop.share

        def apply(*args: Any, **kwargs: Any) -> None:
            begun.set()
            assert joins.wait(20)
            apply_weights(*args, **kwargs)

        def joining(loop: DecodeLoop) -> Any:
            found = share(loop)
            joins.set()
            return found

        meanwhile.setattr("helmsman.engines._hf.decode_loop.apply_weights", apply)
        meanwhile.setattr(DecodeLoop, "share", joining)
        update = asyncio.ensure_future(first.update_weights(whole, 1))
        assert await asyncio.to_thread(begun.wait, 20)
        with pytest.raises(ValueError, match="has slept or received a whole model; start all"):
            await asyncio.to_thread(first.beside)
        await update
    assert first._base.policies == [first]
    with pytest.raises(ValueError, match="has slept or received a whole model; start all"):
        first.beside()


class Without(InferenceEngine):
    """An engine that has no ``beside``."""


def test_another_policy_needs_an_engine(on_the_host: None) -> None:
    with pytest.raises(
        EngineDeadError, match=r"no engine '' runs in its worker, which has none. St"
    ):
        another_policy()
    Without.__abstractmethods__ = frozenset()
    engines: dict[str, InferenceEngine] = {
        "rollout/0": Without(),  # type: ignore[abstract]
        "named": HFRolloutEngine(model=LLAMA),
    }
    with within(WorkerContext(worker_id="rollout/0", node="", engines=engines)):
        with pytest.raises(
            NotImplementedError, match="Without serves one policy: it has no beside"
        ):
            another_policy()
        for name in ("named", "other"):  # the one does not run yet, the other does not exist
            with pytest.raises(EngineDeadError, match=f"'{name}' runs .* has rollout/0, named. S"):
                another_policy(name)
    engines["named"].initialize()
    with within(WorkerContext(worker_id="rollout/0", node="", engines=engines)):
        policy = another_policy("named")
    policy.initialize()
    for engine in (policy, engines["named"]):
        engine.destroy()


def test_roles_in_one_process(on_the_host: None) -> None:
    """Workers of InlineScheduler share a process, but not their engines."""
    shared = SchedulingStrategy(type="colocation", target="first")
    fields = {"model": LLAMA, **FIELDS}
    with InlineScheduler() as scheduler:
        job = Job(role="first", replicas=2)
        first = RolloutController(scheduler, HFRolloutEngine, job, (), fields, "named")
        with (
            first,
            pytest.raises(GroupCallError, match="no engine 'first/[01]' runs in its worker, w"),
        ):
            RolloutController(
                scheduler, ANOTHER, Job(role="second", replicas=2, scheduling_strategy=shared)
            ).initialize()
        second = RolloutController(
            scheduler,
            ANOTHER,
            Job(role="second", replicas=2, scheduling_strategy=shared),
            engine_kwargs={"base": "named"},
        )
        with (
            RolloutController(scheduler, HFRolloutEngine, job, (), fields, "named") as first,
            second,
        ):
            greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
            prompts = [random_tokens(5, seed=seed) for seed in range(8)]
            mine, theirs = (each.generate(prompts, greedy) for each in (first, second))
            assert [each.token_ids for each in mine] == [each.token_ids for each in theirs]
            assert second.versions() == {"second/0": 0, "second/1": 0}
            assert scheduler.call_engine("second/0", "stats")["num_generated_tokens"] > 0
