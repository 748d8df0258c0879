"""Test requests, weights and sleep of one VLLMEngine in this process, on the CPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helmsman.api.errors import EngineDeadError
from helmsman.api.generation import SamplingParams
from helmsman.api.weights import CollectiveTarget
from helmsman.engines._vllm.internals import usage_context
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.vllm_engine import VLLMEngine
from helmsman.engines.weights import PartialWeightUpdateError
from tests.vllm.engine_suite import LONG, EngineSuite
from tests.vllm.vllm_models import (
    ENGINE,
    EOS,
    LLAMA,
    MAX_LEN,
    VOCAB,
    differences,
    folder_of,
    is_greedy,
    logprobs_of,
    model_of,
    weights_of,
)
from tests.vllm.vllm_served import (
    GREEDY,
    PROMPTS,
    Served,
    broadcast,
    require_the_trainers,
    until,
    written,
)

pytestmark = pytest.mark.timeout(300)  # a start takes 15 s, and 60 s beside other work


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = model_of(LLAMA, seed=1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        # Buckets end within layers, so a part of a layer waits for its rest.
        engine = VLLMEngine(
            model=folder_of(model, tmp_path_factory.mktemp("llama")), bucket_bytes=200_000, **ENGINE
        )
        engine.initialize()
        yield Served(engine, model)
        engine.destroy()


class TestSuite(EngineSuite):
    """The suite on VLLMEngine."""


# --- requests -------------------------------------------------------------------------------------


async def test_generate_ignores_end_token(served: Served) -> None:
    drawn = SamplingParams(seed=5, max_new_tokens=256)
    results = await served.generate([[each] for each in range(8)], drawn)
    assert {len(each.token_ids) for each in results} == {256}
    assert any(EOS in each.token_ids for each in results), "it was drawn"
    ended = await served.generate(
        [[each] for each in range(8)], msgspec.structs.replace(drawn, stop_token_ids=(EOS,))
    )
    for whole, cut in zip(results, ended, strict=True):
        if EOS in whole.token_ids:
            assert cut.token_ids == whole.token_ids[: whole.token_ids.index(EOS) + 1]


async def test_generate_seeded_continuation(served: Served) -> None:
    drawn = SamplingParams(seed=4, max_new_tokens=8)
    (first,) = await served.generate([[7]], drawn)
    request = served.request([7, *first.token_ids], drawn, num_generated=8)
    again = await asyncio.gather(
        *(served.engine.agenerate(msgspec.structs.replace(request, request_id=x)) for x in "ab")
    )
    assert again[0].token_ids == again[1].token_ids
    (fresh,) = await served.generate([[7, *first.token_ids]], drawn)
    assert again[0].token_ids != fresh.token_ids, (
        "a stream of its own, or it would draw the first numbers again"
    )


async def test_generate_many_seeded_prompts(served: Served) -> None:
    prompts = [[each] * (MAX_LEN - 8) for each in range(16)]
    results = await served.generate(prompts, SamplingParams(seed=1, max_new_tokens=4))
    assert differences(served.model, prompts, results).max() < 1e-3


async def test_generate_samples_seeds_and_prefill(served: Served) -> None:
    prompt = [(7 * each) % VOCAB for each in range(300)]  # two blocks of 128 tokens, and a rest
    requests = [
        served.request(prompt, SamplingParams(seed=seed, max_new_tokens=16)) for seed in range(8)
    ]
    before = served.engine.stats()
    results = await served.engine.agenerate_samples(requests)
    after = served.engine.stats()
    assert [each.request_id for each in results] == [each.request_id for each in requests]
    assert len({tuple(each.token_ids) for each in results}) == 8
    assert (
        results[3].token_ids == (await served.generate([prompt], requests[3].sampling))[0].token_ids
    )
    computed = after["num_prompt_tokens"] - before["num_prompt_tokens"]
    assert computed == 300 + 7 * (300 - 256), "all but the last block by the first alone"
    assert after["num_prefix_hits"] - before["num_prefix_hits"] == 7 * 256
    with pytest.raises(ValueError, match="have different prompts"):
        await served.engine.agenerate_samples([served.request([1]), served.request([2])])
    twice = served.request([1], SamplingParams(max_new_tokens=LONG))
    with pytest.raises(ValueError, match="already in flight"):
        await served.engine.agenerate_samples([twice, twice])
    await until(
        lambda: not served.engine.stats()["num_running"] + served.engine.stats()["num_waiting"]
    )
    assert (
        await served.engine.agenerate(msgspec.structs.replace(twice, sampling=GREEDY))
    ).stop_reason == "length"


async def test_generate_cancelled(served: Served) -> None:
    async def usage() -> float:
        found = 0.0
        while not found:  # the request may have ended before the abort
            short = await served.begun(
                served.request([1], SamplingParams(temperature=0.0, max_new_tokens=120))
            )
            found = served.engine.stats()["kv_cache_usage"]
            await short
        return found

    alone = await usage()
    request = served.request([3], SamplingParams(temperature=0.0, max_new_tokens=LONG))
    task = await served.begun(request)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: served.engine.stats()["num_running"] == 0)
    assert await usage() == alone, "no other request has any of the cache"
    assert (
        await served.engine.agenerate(msgspec.structs.replace(request, sampling=GREEDY))
    ).stop_reason == "length"


def test_usage_context_has_defaults_of_vllm() -> None:
    """For other contexts, vLLM falls back to 2,048 tokens at once."""
    from vllm.engine.arg_utils import EngineArgs

    for defaults in EngineArgs.get_batch_defaults(world_size=1):
        assert usage_context() in defaults


async def test_stats_load_and_cache(served: Served) -> None:
    task = await served.begun(
        served.request([3] * 200, SamplingParams(temperature=0.0, max_new_tokens=256)), num=8
    )
    busy = served.engine.stats()
    assert (busy["num_running"], busy["num_waiting"]) == (1, 0)
    assert 0 < busy["kv_cache_usage"] <= 1
    await task
    idle = served.engine.stats()
    assert (idle["num_running"], idle["num_waiting"], idle["kv_cache_usage"]) == (0, 0, 0.0)
    assert idle["version"] == served.engine.get_version()


def test_calls_from_any_event_loop(served: Served) -> None:
    assert (
        asyncio.run(served.generate([[1]]))[0].token_ids
        == asyncio.run(served.generate([[1]]))[0].token_ids
    )


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.ci
async def test_update_weights_by_broadcast(served: Served) -> None:
    model = model_of(LLAMA, seed=4)
    await broadcast(served, model, 20, weights_of(model))
    await require_the_trainers(served, "broadcasts")
    unfit = weights_of(model) | {"strange.weight": torch.zeros(3)}
    with pytest.raises(ValueError, match="1 unexpected: strange.weight"):
        await broadcast(served, model, 21, unfit)
    await require_the_trainers(served, "after broadcasts that did not fit")


async def test_update_torn_blocks_decoding(served: Served, tmp_path: Path) -> None:
    version = served.engine.get_version()
    running = await served.begun(
        served.request([3], SamplingParams(temperature=0.0, max_new_tokens=LONG))
    )
    torn = written(model_of(LLAMA, seed=6), tmp_path, spoilt="model.norm.weight")
    with pytest.raises(PartialWeightUpdateError, match="model.norm.weight"):
        await served.engine.update_weights(torn, version + 1)
    assert served.engine.get_version() == version
    num_before = served.engine.stats()["num_generated_tokens"]
    waiting = asyncio.ensure_future(served.engine.agenerate(served.request(PROMPTS[0])))
    await until(lambda: served.engine.stats()["num_waiting"] == 2)
    assert await served.engine.abort() == 2
    assert [(await each).stop_reason for each in (running, waiting)] == ["abort", "abort"]
    assert served.engine.stats()["num_generated_tokens"] == num_before
    late = asyncio.ensure_future(served.engine.agenerate(served.request(PROMPTS[0])))
    await served.bring(model_of(LLAMA, seed=7), version + 2)
    result = await late
    assert set(result.versions) == {version + 2}
    assert is_greedy(served.model, PROMPTS[0], result.token_ids)
    await require_the_trainers(served, "after a torn update and a whole one")


@pytest.mark.ci
async def test_update_during_requests_keeps_cache(served: Served) -> None:
    version, old = served.engine.get_version(), served.model
    new = model_of(LLAMA, seed=8)
    long = SamplingParams(temperature=0.0, max_new_tokens=200)
    tasks = await served.all_begun([served.request(prompt, long) for prompt in PROMPTS])
    waiting = asyncio.ensure_future(served.engine.agenerate(served.request([50], long)))
    await served.bring(new, version + 1)
    for prompt, result in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
        num_old = result.versions.count(version)
        assert 0 < num_old < 200
        assert result.versions == [version] * num_old + [version + 1] * (200 - num_old)
        expected = _over_old_keys(old, new, prompt, result.token_ids, num_old)
        assert (expected - torch.tensor(result.logprobs)).abs().max() < 1e-3
        by_old = logprobs_of(old, prompt, result.token_ids)
        assert (by_old - torch.tensor(result.logprobs)).abs()[num_old] > 1e-3, (
            "the first of the new version is by it"
        )
    assert set((await waiting).versions) <= {version, version + 1}


@torch.no_grad()
def _over_old_keys(
    old: Any, new: Any, prompt: list[int], tokens: list[int], num_old: int
) -> torch.Tensor:
    """Return log-probabilities by the old model, then by the new one over the old keys and values.

    The new model begins with the last token of the old one, which has no keys and values yet.
    """
    seen = [*prompt, *tokens[: num_old - 1]]
    by_old = old(torch.tensor([seen]), use_cache=True)
    rest = torch.tensor([tokens[num_old - 1 : -1]])
    by_new = new(rest, past_key_values=by_old.past_key_values, use_cache=True)
    logits = torch.cat([by_old.logits[0, len(prompt) - 1 :], by_new.logits[0]])
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


async def test_update_of_cancelled_caller_ends(served: Served) -> None:
    model, version = model_of(LLAMA, seed=9), served.engine.get_version() + 1
    task = asyncio.ensure_future(served.engine.update_weights(weights_of(model), version))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: served.engine.get_version() == version)
    served.model = model
    await require_the_trainers(served, "after a cancelled call")


# --- sleep ----------------------------------------------------------------------------------------


@pytest.mark.ci
async def test_sleep_refuses_requests_and_weights(served: Served) -> None:
    running = await served.begun(
        served.request([3], SamplingParams(temperature=0.0, max_new_tokens=LONG))
    )
    with pytest.raises(RuntimeError, match="1 requests are in flight"):
        await served.engine.sleep()
    await served.engine.abort()
    await running
    falling_asleep = asyncio.ensure_future(served.engine.sleep())
    late = asyncio.ensure_future(served.engine.agenerate(served.request([3])))
    with pytest.raises(RuntimeError, match="the engine is asleep"):
        await late
    await falling_asleep
    for _ in range(2):  # the second time after a wake of the weights alone
        await served.engine.sleep()
        with pytest.raises(RuntimeError, match="the engine is asleep"):
            await served.engine.agenerate(served.request([3]))
        with pytest.raises(RuntimeError, match="weights_only"):
            await served.engine.update_weights(weights_of(served.model), 100)
        await served.engine.wake(weights_only=True)
    await served.engine.wake()
    await served.engine.wake()
    await require_the_trainers(served, "after sleep")


@pytest.mark.ci
async def test_sleep_level_2_needs_update(served: Served) -> None:
    version, model = served.engine.get_version() + 1, model_of(LLAMA, seed=10)
    await served.engine.sleep()
    await served.engine.sleep(2)
    await served.engine.wake(weights_only=True)
    with pytest.raises(RuntimeError, match="the engine is asleep"):
        await served.engine.agenerate(served.request([3]))
    await served.engine.wake()
    waiting = asyncio.ensure_future(served.engine.agenerate(served.request([3])))
    await until(lambda: served.engine.stats()["num_waiting"] == 1)
    assert not waiting.done()
    await served.bring(model, version)
    assert is_greedy(model, [3], (await waiting).token_ids)
    await served.engine.sleep(2)
    await served.engine.wake(weights_only=True)
    await served.bring(model_of(LLAMA, seed=11), version + 1)
    await served.engine.wake()
    await require_the_trainers(served, "after level 2")


def test_failed_start_leaves_no_thread(tmp_path: Path) -> None:
    model = folder_of(model_of(LLAMA, seed=1), tmp_path)
    before = [each for each in threading.enumerate() if each.name == "helmsman-vllm"]
    engine = VLLMEngine(model=model, engine_args={"max_num_sequences": 3}, **ENGINE)
    with pytest.raises(
        ValueError, match="'max_num_sequences', which .* did you mean 'max_num_seqs'"
    ):
        engine.initialize()
    assert [each for each in threading.enumerate() if each.name == "helmsman-vllm"] == before
    engine.destroy()


async def test_destroy_ends_requests_and_update(served: Served) -> None:
    """The last test of this module, since it ends the shared engine."""
    store = WeightGroup(torch.device("cpu"))
    place = CollectiveTarget(
        version=99,
        group_id="missing",
        address="127.0.0.1",
        port=store.open_store("127.0.0.1"),
        key="plain:secret",
        rank=1,
        world_size=2,
        timeout_s=600.0,
    )
    running = await served.begun(
        served.request([3], SamplingParams(temperature=0.0, max_new_tokens=LONG))
    )
    updating = asyncio.ensure_future(served.engine.update_weights(place, 99))
    await until(lambda: served.engine.stats()["num_waiting"] == 1)
    await asyncio.to_thread(served.engine.destroy)
    assert (await running).stop_reason == "abort"
    with pytest.raises(EngineDeadError, match="it was destroyed"):
        await updating
    with pytest.raises(RuntimeError, match="not running"):
        await served.engine.agenerate(served.request([3]))
    with pytest.raises(RuntimeError, match="destroyed; make a new one"):
        served.engine.initialize()
    served.engine.destroy()
    store.close()
