"""Tests of the rollout engine: tokens among other requests, weight updates, aborts and sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams
from helmsman.controller._rollout.request_api import samples_of
from helmsman.engines._models.model import build_model
from helmsman.engines.rollout import HFRolloutEngine
from helmsman.engines.rollout_config import RolloutConfig
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.small_models import (
    GEMMA3_MIXED,
    GPT2,
    LLAMA,
    MISTRAL_SLIDING,
    QWEN2,
    QWEN3_NEXT_LINEAR,
    VOCAB,
    random_tokens,
)

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
ENDLESS = SamplingParams(max_new_tokens=1000)
PROMPTS = [random_tokens(length, seed=length) for length in (1, 3, 8, 15, 8, 2)]


Make = Callable[..., HFRolloutEngine]


@pytest.fixture
def make(on_the_host: None) -> Iterator[Make]:
    made: list[HFRolloutEngine] = []

    def build(**fields: Any) -> HFRolloutEngine:
        engine = HFRolloutEngine(
            **{"model": QWEN2, "max_model_len": 64, "max_concurrency": 4, **fields}
        )
        made.append(engine)
        engine.initialize()
        return engine

    yield build
    for engine in made:
        engine.destroy()


@pytest.fixture
def engine(make: Make) -> HFRolloutEngine:
    return make()


@pytest.fixture
def long_engine(make: Make) -> HFRolloutEngine:
    """Build an engine whose sequences last long enough to be interrupted."""
    return make(max_model_len=4096, max_concurrency=2)


def request(name: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling)


async def generate(
    engine: HFRolloutEngine, prompts: list[list[int]], sampling: SamplingParams
) -> list[GenerationResult]:
    requests = [request(str(index), prompt, sampling) for index, prompt in enumerate(prompts)]
    return await asyncio.gather(*map(engine.agenerate, requests))


async def until_running(engine: HFRolloutEngine, num: int, num_generated: int = 1) -> None:
    """Wait for a number of running requests and of generated tokens."""
    for _ in range(10_000):
        stats = engine.stats()
        if stats["num_running"] == num and stats["num_generated_tokens"] >= num_generated:
            return
        await asyncio.sleep(0.001)
    pytest.fail(f"{num} running and {num_generated} tokens were expected; the engine has {stats}")


def reference_tokens(config: dict[str, Any], prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation by whole forward passes, without a cache."""
    model = build_model(config, seed=0, dtype=torch.float32)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(
                int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "config",
    [QWEN2, LLAMA, GPT2, MISTRAL_SLIDING, GEMMA3_MIXED],
    ids=lambda config: config["model_type"],
)
async def test_agenerate_greedy_equals_forward_passes(make: Make, config: dict[str, Any]) -> None:
    # Six requests on four slots: some wait, and rows move when others end.
    results = await generate(make(model=config), PROMPTS, GREEDY)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == reference_tokens(config, prompt, 12)
        assert result.stop_reason == "length"
    assert len({token for result in results for token in result.token_ids}) > 10, (
        "the model only repeats itself"
    )


@pytest.mark.parametrize(
    "config", [{**QWEN2, "max_position_embeddings": 20}, {**GPT2, "n_positions": 20}]
)
async def test_agenerate_max_positions_of_model(make: Make, config: dict[str, Any]) -> None:
    """The model's own limit applies where it is below max_model_len."""
    engine = make(model=config)
    results = await generate(
        engine, [random_tokens(length, seed=length) for length in (1, 12, 19)], ENDLESS
    )
    assert [(len(result.token_ids), result.stop_reason) for result in results] == [
        (19, "length"),
        (8, "length"),
        (1, "length"),
    ]
    message = (
        "a prompt of 20 tokens, which leaves no room for a continuation within "
        "max_position_embeddings of the model=20"
    )
    with pytest.raises(ValueError, match=message):
        await engine.agenerate(request("long", random_tokens(20, seed=0)))


async def test_agenerate_seed_decides_tokens(make: Make) -> None:
    engine = make(max_concurrency=3)
    params = [
        SamplingParams(max_new_tokens=5 + 4 * seed, top_p=0.9, seed=seed) for seed in range(6)
    ]
    requests = [
        request(str(index), prompt, sampling)
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    alone = [await engine.agenerate(each) for each in requests]

    async def later(index: int, each: GenerationRequest) -> GenerationResult:
        await asyncio.sleep(0.003 * index)
        return await engine.agenerate(each)

    staggered = await asyncio.gather(
        *(later(index, each) for index, each in enumerate(reversed(requests)))
    )
    assert [result.token_ids for result in reversed(staggered)] == [
        result.token_ids for result in alone
    ]


async def test_agenerate_continuation_with_seed(engine: HFRolloutEngine) -> None:
    whole = await engine.agenerate(
        request("a", PROMPTS[2], SamplingParams(max_new_tokens=20, seed=5))
    )
    first = await engine.agenerate(
        request("a", PROMPTS[2], SamplingParams(max_new_tokens=8, seed=5))
    )
    rest = await engine.agenerate(
        request("a", PROMPTS[2] + first.token_ids, SamplingParams(max_new_tokens=12, seed=5))
    )
    assert first.token_ids + rest.token_ids == whole.token_ids


async def test_agenerate_without_seed(make: Make) -> None:
    results = await generate(
        make(max_concurrency=16), [PROMPTS[0]] * 16, SamplingParams(max_new_tokens=10)
    )
    assert len({tuple(result.token_ids) for result in results}) > 8


async def test_agenerate_distribution_of_first_tokens(make: Make) -> None:
    config = {**QWEN2, "initializer_range": 0.1}
    num, prompt = 4000, PROMPTS[2]
    logits = (
        build_model(config, seed=0, dtype=torch.float32)(input_ids=torch.tensor([prompt]))
        .logits[0, -1]
        .detach()
    )
    expected = (logits / 0.7).softmax(-1)
    expected[expected.argsort()[:-5]] = 0
    expected /= expected.sum()
    engine = make(model=config, max_concurrency=256)
    params = [
        SamplingParams(max_new_tokens=1, temperature=0.7, top_k=5, seed=seed) for seed in range(num)
    ]
    results = await asyncio.gather(
        *(engine.agenerate(request(str(each.seed), prompt, each)) for each in params)
    )
    counts = torch.tensor([result.token_ids[0] for result in results]).bincount(minlength=VOCAB)
    # Five standard deviations of a binomial count; the seeds are fixed, so this does not flake.
    assert (
        (counts - num * expected).abs() <= 5 * (num * expected * (1 - expected)).sqrt() + 1e-3
    ).all()


async def test_agenerate_logprobs_equal_train_engine(engine: HFRolloutEngine) -> None:
    results = await generate(
        engine, PROMPTS, SamplingParams(max_new_tokens=20, temperature=0.8, top_k=10, seed=1)
    )
    trainer = FSDPTrainEngine(model=QWEN2)
    trainer.initialize()
    samples = [
        {"input_ids": prompt + result.token_ids}
        for prompt, result in zip(PROMPTS, results, strict=True)
    ]
    for prompt, result, logprobs in zip(PROMPTS, results, trainer.forward(samples), strict=True):
        torch.testing.assert_close(
            torch.tensor(result.logprobs), logprobs[len(prompt) :], atol=1e-4, rtol=0
        )
    trainer.destroy()


async def test_agenerate_bfloat16(make: Make) -> None:
    model = {**QWEN2, "initializer_range": 0.1}
    exact, rounded = make(model=model), make(model=model, dtype="bfloat16")
    sampling = SamplingParams(max_new_tokens=1, temperature=0)
    for one, two in zip(
        await generate(exact, PROMPTS, sampling),
        await generate(rounded, PROMPTS, sampling),
        strict=True,
    ):
        assert one.token_ids == two.token_ids
        assert one.logprobs == pytest.approx(two.logprobs, abs=0.05)


async def test_agenerate_stop_token(engine: HFRolloutEngine) -> None:
    tokens = (await engine.agenerate(request("a", PROMPTS[3]))).token_ids
    stop = tokens[4]
    sampling = SamplingParams(max_new_tokens=12, temperature=0, stop_token_ids=(stop, 49))
    result = await engine.agenerate(request("a", PROMPTS[3], sampling))
    assert result.token_ids == tokens[: tokens.index(stop) + 1]
    assert result.stop_reason == "stop"
    assert len(result.logprobs) == len(result.versions) == len(result.token_ids)


async def test_agenerate_max_model_len(engine: HFRolloutEngine) -> None:
    result = await engine.agenerate(request("a", PROMPTS[3], ENDLESS))
    assert len(result.token_ids) == 64 - len(PROMPTS[3])
    assert result.stop_reason == "length"
    almost_full = await engine.agenerate(request("a", random_tokens(63, seed=0), ENDLESS))
    assert len(almost_full.token_ids) == 1


async def test_agenerate_max_prefill_tokens(make: Make) -> None:
    small, large = make(max_prefill_tokens=1), make()
    alone, together = await generate(small, PROMPTS, GREEDY), await generate(large, PROMPTS, GREEDY)
    assert [result.token_ids for result in alone] == [result.token_ids for result in together]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty prompt"),
        ([1] * 64, "prompt of 64 tokens, which leaves no room"),
        ([1, VOCAB], f"the token {VOCAB} in its prompt; expected 0 to {VOCAB - 1}"),
        ([1, -1], "the token -1"),
    ],
)
async def test_agenerate_invalid_prompts(
    engine: HFRolloutEngine, prompt: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await engine.agenerate(request("a", prompt))


async def test_agenerate_seed_out_of_range(engine: HFRolloutEngine) -> None:
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=f"the seed {seed}; expected"):
            await engine.agenerate(request("a", PROMPTS[1], SamplingParams(seed=seed)))
    await engine.agenerate(request("a", PROMPTS[1], SamplingParams(seed=2**64 - 1)))


async def test_agenerate_id_in_flight_once(engine: HFRolloutEngine) -> None:
    first = asyncio.create_task(engine.agenerate(request("a", PROMPTS[2])))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="'a' is already in flight"):
        await engine.agenerate(request("a", PROMPTS[2]))
    await first
    await engine.agenerate(request("a", PROMPTS[2]))


async def test_agenerate_cancelled(long_engine: HFRolloutEngine) -> None:
    tasks = [
        asyncio.create_task(long_engine.agenerate(request(name, PROMPTS[2], ENDLESS)))
        for name in "abc"
    ]
    await until_running(long_engine, 2)
    tasks[0].cancel()
    tasks[2].cancel()
    await until_running(long_engine, 1)
    result = await long_engine.agenerate(request("a", PROMPTS[2], SamplingParams(max_new_tokens=3)))
    assert len(result.token_ids) == 3
    await long_engine.abort()
    await tasks[1]


def samples(
    name: str, prompt: list[int], num: int, sampling: SamplingParams = GREEDY
) -> list[GenerationRequest]:
    return samples_of(request(name, prompt, sampling), num)


async def test_agenerate_samples_equal_single_requests(engine: HFRolloutEngine) -> None:
    requests = samples("a", PROMPTS[3], 4, SamplingParams(max_new_tokens=12, seed=3))
    together = await engine.agenerate_samples(requests)
    assert engine.stats()["num_prompt_tokens"] == len(PROMPTS[3]) - 1
    assert [each.request_id for each in together] == ["a#0", "a#1", "a#2", "a#3"]
    assert len({tuple(each.token_ids) for each in together}) == 4
    alone = [await engine.agenerate(each) for each in requests]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert engine.stats()["num_prompt_tokens"] == 5 * (len(PROMPTS[3]) - 1)
    # There are four slots, so the ten samples run in three rounds.
    assert len(await engine.agenerate_samples(samples("b", PROMPTS[3], 10))) == 10
    assert engine.stats()["num_prompt_tokens"] == (5 + 3) * (len(PROMPTS[3]) - 1)


async def test_agenerate_samples_wait_for_slots(engine: HFRolloutEngine) -> None:
    first = [
        asyncio.create_task(engine.agenerate(request(str(i), PROMPTS[i], ENDLESS))) for i in (2, 3)
    ]
    await until_running(engine, 2)
    assert len(await engine.agenerate_samples(samples("a", PROMPTS[4], 3))) == 3
    assert any(task.done() for task in first), "until then there were two slots"
    assert engine.stats()["num_prompt_tokens"] == sum(len(PROMPTS[i]) - 1 for i in (2, 3, 4))
    await asyncio.gather(*first)


async def test_abort_samples_by_id(long_engine: HFRolloutEngine) -> None:
    task = asyncio.create_task(long_engine.agenerate_samples(samples("a", PROMPTS[2], 4, ENDLESS)))
    await until_running(long_engine, 2, num_generated=10)
    assert long_engine.stats()["num_waiting"] == 2
    # Two requests wait for a slot and are aborted without tokens.
    assert await long_engine.abort(["a#0", "a#2", "a#3", "unknown"]) == 3
    await until_running(long_engine, 1)
    assert long_engine.stats()["num_waiting"] == 0
    assert not task.done()
    assert await long_engine.abort() == 1
    results = await task
    assert {each.stop_reason for each in results} == {"abort"}
    assert [bool(each.token_ids) for each in results] == [True, True, False, False]
    assert all(len(each.token_ids) == len(each.logprobs) == len(each.versions) for each in results)
    assert await long_engine.abort() == long_engine.stats()["num_running"] == 0


async def test_agenerate_samples_cancelled(long_engine: HFRolloutEngine) -> None:
    task = asyncio.create_task(long_engine.agenerate_samples(samples("a", PROMPTS[2], 4, ENDLESS)))
    await until_running(long_engine, 2)
    task.cancel()
    await until_running(long_engine, 0)
    assert len(await long_engine.agenerate_samples(samples("a", PROMPTS[2], 4))) == 4


async def test_agenerate_samples_invalid(engine: HFRolloutEngine) -> None:
    with pytest.raises(ValueError, match="'a' and 'b' have different prompts"):
        await engine.agenerate_samples([request("a", PROMPTS[2]), request("b", PROMPTS[3])])
    with pytest.raises(ValueError, match="'a' is already in flight"):
        await engine.agenerate_samples([request("a", PROMPTS[2])] * 2)
    assert await engine.agenerate_samples([]) == []
    assert engine.stats()["num_running"] == engine.stats()["num_waiting"] == 0


async def test_update_weights_during_request(long_engine: HFRolloutEngine) -> None:
    task = asyncio.create_task(long_engine.agenerate(request("a", PROMPTS[2], ENDLESS)))
    for version in (3, 4):
        await until_running(
            long_engine, 1, num_generated=long_engine.stats()["num_generated_tokens"] + 5
        )
        weights = build_model(QWEN2, seed=version, dtype=torch.bfloat16).state_dict()
        assert await long_engine.update_weights(weights, version) == version
        assert long_engine.get_version() == long_engine.stats()["version"] == version
    await until_running(
        long_engine, 1, num_generated=long_engine.stats()["num_generated_tokens"] + 5
    )
    await long_engine.abort()
    versions = (await task).versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 3, 4}


async def test_update_weights_unfit(engine: HFRolloutEngine) -> None:
    before = await engine.agenerate(request("a", PROMPTS[2]))
    with pytest.raises(ValueError, match="missing"):
        await engine.update_weights({"extra": torch.zeros(1)}, 1)
    assert engine.get_version() == 0
    assert await engine.agenerate(request("a", PROMPTS[2])) == before


async def test_agenerate_step_fails(engine: HFRolloutEngine) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("broken")

    # There are four slots: waiting requests fail, too.
    requests = [engine.agenerate(request(str(i), PROMPTS[2])) for i in range(6)]
    hook = torch.nn.modules.module.register_module_forward_pre_hook(fail)
    try:
        results = await asyncio.wait_for(
            asyncio.gather(*requests, return_exceptions=True), timeout=60
        )
    finally:
        hook.remove()
    for error in results:
        assert isinstance(error, RuntimeError)
        assert "ZeroDivisionError: broken" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)
    assert (await engine.agenerate(request("0", PROMPTS[2]))).token_ids == reference_tokens(
        QWEN2, PROMPTS[2], 12
    )


async def test_destroy_during_requests(long_engine: HFRolloutEngine) -> None:
    tasks = [
        asyncio.create_task(long_engine.agenerate(request(name, PROMPTS[2], ENDLESS)))
        for name in "abc"
    ]
    await until_running(long_engine, 2)
    await asyncio.to_thread(long_engine.destroy)
    long_engine.destroy()
    assert [result.stop_reason for result in await asyncio.gather(*tasks)] == ["abort"] * 3
    with pytest.raises(RuntimeError, match="not running"):
        await long_engine.agenerate(request("a", PROMPTS[2]))
    with pytest.raises(RuntimeError, match="make a new one"):
        long_engine.initialize()


def test_agenerate_from_any_event_loop(engine: HFRolloutEngine) -> None:
    first, second = (asyncio.run(generate(engine, PROMPTS, GREEDY)) for _ in range(2))
    assert [result.token_ids for result in first] == [result.token_ids for result in second]


def test_initialize_unsupported_layers() -> None:
    engine = HFRolloutEngine(model=QWEN3_NEXT_LINEAR)
    with pytest.raises(ValueError, match="linear_attention"):
        engine.initialize()
    engine.destroy()


def test_rollout_config_invalid_fields() -> None:
    config = RolloutConfig(model=QWEN2)
    assert HFRolloutEngine(config).config is config
    with pytest.raises(msgspec.ValidationError, match="slots"):
        HFRolloutEngine(model=QWEN2, slots=3)
    with pytest.raises(ValueError, match="max_concurrency"):
        RolloutConfig(model=QWEN2, max_concurrency=0)
    with pytest.raises(RuntimeError, match="initialize"):
        HFRolloutEngine(config).get_version()


# --- sleep ----------------------------------------------------------------------------------------


def memory_of(engine: HFRolloutEngine) -> tuple[int, int]:
    """Return the bytes of an engine's weights, and of its keys and values."""
    loop = engine._running()
    weights = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for each in loop._model.parameters()
    }
    cache = [pool for layer in loop._batch.cache.layers for pool in (layer.keys, layer.values)]
    return sum(weights.values()), sum(pool.untyped_storage().nbytes() for pool in cache)


async def test_sleep_and_wake(engine: HFRolloutEngine) -> None:
    expected = await engine.agenerate(request("a", PROMPTS[2]))
    awake = memory_of(engine)
    assert min(awake) > 0
    await engine.sleep()
    await engine.sleep(1)
    assert memory_of(engine) == (0, 0)
    with pytest.raises(RuntimeError, match=r"asleep and accepts no requests; call wake\(\) first"):
        await engine.agenerate(request("b", PROMPTS[2]))
    with pytest.raises(RuntimeError, match=r"call wake\(weights_only=True\) first"):
        await engine.update_weights({}, 1)
    await engine.wake(weights_only=True)
    assert memory_of(engine) == (awake[0], 0)
    with pytest.raises(RuntimeError, match="accepts no requests"):
        await engine.agenerate(request("b", PROMPTS[2]))
    await engine.wake()
    await engine.wake()
    assert memory_of(engine) == awake
    assert (await engine.agenerate(request("b", PROMPTS[2]))).token_ids == expected.token_ids


@pytest.mark.parametrize("levels", [(2,), (1, 2)])
async def test_wake_without_weights_holds_requests(
    engine: HFRolloutEngine, levels: tuple[int, ...]
) -> None:
    expected = await engine.agenerate(request("a", PROMPTS[2]))
    weights = build_model(QWEN2, seed=0, dtype=torch.float32).state_dict()
    for level in levels:
        await engine.sleep(level)
    assert memory_of(engine) == (0, 0)
    await engine.wake()
    waiting = asyncio.ensure_future(engine.agenerate(request("b", PROMPTS[2])))
    with pytest.raises(ValueError, match="do not fit"):
        await engine.update_weights({}, 1)
    await engine.update_weights(weights, 1)
    result = await waiting
    assert (result.token_ids, result.versions) == (expected.token_ids, [1] * 12)


async def test_sleep_during_requests(long_engine: HFRolloutEngine) -> None:
    running = asyncio.ensure_future(long_engine.agenerate(request("a", PROMPTS[2], ENDLESS)))
    await until_running(long_engine, 1)
    with pytest.raises(RuntimeError, match=r"1 request\(s\) are in flight"):
        await long_engine.sleep()
    with pytest.raises(ValueError, match="level is 3"):
        await long_engine.sleep(3)
    await long_engine.abort()
    assert (await running).stop_reason == "abort"
    await long_engine.sleep()
