"""Test requests, weights and deaths of one ServerEngine, whose server is vLLM's on the CPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from helmsman._process.ports import PortLeases
from helmsman.api.errors import ServerLostError, ServerRequestError, ServerStartError
from helmsman.api.generation import SamplingParams
from helmsman.api.workers import WorkerContext, within
from helmsman.engines.server_engine import ServerEngine
from tests.processes import command_of
from tests.vllm.engine_suite import LONG, EngineSuite
from tests.vllm.vllm_adapters import RANK, require_switches, sent, write_peft
from tests.vllm.vllm_models import (
    LLAMA,
    MAX_LEN,
    SPEC_ENV,
    differences,
    folder_of,
    is_greedy,
    model_of,
)
from tests.vllm.vllm_served import PROMPTS, OnOneLoop, Served, require_the_trainers, until

pytestmark = pytest.mark.timeout(400)  # the start of a server counts, too


@pytest.fixture(scope="module")
def leases() -> Iterator[PortLeases]:
    leases = PortLeases()
    yield leases
    leases.close()


def engine_of(leases: PortLeases, model: str, *args: str, **fields: Any) -> ServerEngine:
    with within(
        WorkerContext(worker_id="rollout/0", node="127.0.0.1", ports=(leases.lease(1)[0],))
    ):
        return ServerEngine(
            model=model,
            dtype="float32",
            max_model_len=MAX_LEN,
            args=("--enforce-eager", *args),
            env=SPEC_ENV,
            start_timeout_s=300.0,
            **fields,
        )


@pytest.fixture(scope="module")
def served(leases: PortLeases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = model_of(LLAMA, seed=1)
    engine = engine_of(leases, folder_of(model, tmp_path_factory.mktemp("llama")))
    engine.initialize()
    yield Served(OnOneLoop(engine), model)
    engine.destroy()


class TestSuite(EngineSuite):
    """The suite on ServerEngine with vLLM's server."""


@pytest.mark.ci
async def test_generate_samples_differ(served: Served) -> None:
    requests = [served.request(PROMPTS[0], SamplingParams(max_new_tokens=24)) for _ in range(4)]
    results = await served.engine.agenerate_samples(requests)
    assert [each.request_id for each in results] == [each.request_id for each in requests]
    assert len({tuple(each.token_ids) for each in results}) == 4
    assert differences(served.model, [PROMPTS[0]] * 4, results).max() < 1e-3


async def test_abort_stops_requests_in_server(served: Served) -> None:
    requests = [
        served.request(prompt, SamplingParams(temperature=0.0, max_new_tokens=LONG))
        for prompt in PROMPTS[:2]
    ]
    tasks = [await served.begun(each) for each in requests]
    for ids, num_left in (([requests[0].request_id], 1), (None, 0)):
        assert await served.engine.abort(ids) == 1
        # The server ends them later
        while (await served.stats())["num_running"] > num_left:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [(await each).stop_reason for each in tasks] == ["abort"] * 2


@pytest.mark.ci
async def test_update_during_requests_recomputes(served: Served) -> None:
    old, new, before = served.model, model_of(LLAMA, seed=30), served.engine.get_version()
    long = SamplingParams(temperature=0.0, max_new_tokens=200)
    tasks = await served.all_begun([served.request(prompt, long) for prompt in PROMPTS])
    await served.bring(new, before + 1)
    for prompt, result in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
        num_old = result.versions.count(before)
        assert result.versions == [before] * num_old + [before + 1] * (200 - num_old)
        assert num_old > 0
        assert is_greedy(old, prompt, result.token_ids[:num_old])
        # no key or value of the old model is used afterwards
        cut = [
            *prompt,
            *result.token_ids[:num_old],
        ]
        after = msgspec.structs.replace(
            result, token_ids=result.token_ids[num_old:], logprobs=result.logprobs[num_old:]
        )
        assert is_greedy(new, cut, after.token_ids)
        assert differences(new, [cut], [after]).max() < 1e-3
    assert not os.listdir(served.engine._exchange)
    await require_the_trainers(served, "after an update in the middle of requests")


async def test_adapters_beside_requests(leases: PortLeases, tmp_path: Path) -> None:
    """Versions and log-probabilities over updates by adapters and by a whole model."""
    model = model_of(LLAMA, seed=1)
    engine = engine_of(
        leases, folder_of(model, tmp_path / "llama"), max_lora_rank=RANK, max_loras=2
    )
    engine.initialize()
    try:
        served = Served(OnOneLoop(engine), model)
        await require_switches(served, tmp_path)
        assert not os.listdir(engine._exchange)
        unfit = sent(write_peft(model, 5, tmp_path / "unfit"))
        unfit = {name.replace("q_proj", "q_prompt"): each for name, each in unfit.items()}
        with pytest.raises(ServerRequestError, match="q_prompt"):
            await served.engine.update_weights(unfit, 9)
        await require_the_trainers(served, "after an adapter that the server refused")
        assert not os.listdir(engine._exchange)
    finally:
        engine.destroy()


def test_start_error_quotes_vllm(leases: PortLeases, tmp_path: Path) -> None:
    model = folder_of(model_of(LLAMA, seed=1), tmp_path)
    engine = engine_of(leases, model, "--no-such-flag")
    with pytest.raises(ServerStartError, match="no-such-flag") as raised:
        engine.initialize()
    assert raised.value.exit_code == 2
    engine.destroy()


@pytest.mark.ci
async def test_engine_core_death_fails_server(served: Served) -> None:
    """The last test of this module, since it ends the shared engine."""
    family = [
        psutil.Process(served.engine.server_pid()),
        *psutil.Process(served.engine.server_pid()).children(recursive=True),
    ]
    assert len(family) >= 2
    task = await served.begun(
        served.request(PROMPTS[0], SamplingParams(temperature=0.0, max_new_tokens=LONG))
    )
    os.kill(
        next(each.pid for each in family[1:] if "EngineCore" in command_of(each)), signal.SIGKILL
    )
    with pytest.raises(ServerLostError):
        await task
    await until(lambda: served.engine.failure() is not None)
    assert not [
        each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ]
