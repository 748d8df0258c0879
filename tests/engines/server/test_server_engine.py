"""Test ServerEngine with the little server in both dialects, over real sockets."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from helmsman.api.errors import ServerLostError, ServerRequestError
from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams
from helmsman.api.weights import WeightsInMemory, WeightsOnDisk
from helmsman.engines._weights.sending import checksum_of
from helmsman.engines.server_engine import ServerEngine
from helmsman.engines.weights import PartialWeightUpdateError
from tests.contract.helpers import stop
from tests.engines.little_servers import (
    DIALECTS,
    adapter_of,
    continuation,
    engine_of,
    tensors_of,
    write_model,
)

LIMIT_S = 60.0
ENDLESS = 90_000
PROMPTS = {"a": [1, 2], "b": [5]}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def running(
    dialect: str, folder: Path, *args: str, **others: Any
) -> AsyncIterator[ServerEngine]:
    """Start an engine whose model has the weight 0."""
    with engine_of(dialect, write_model(folder / "model-0", 0.0), *args, **others) as engine:
        await asyncio.to_thread(engine.initialize)
        try:
            yield engine
        finally:
            await asyncio.to_thread(engine.destroy)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    dialect: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServerEngine]:
    """An engine that tests share and leave as it was."""
    async with running(dialect, tmp_path_factory.mktemp("shared")) as engine:
        yield engine
        assert engine.get_version() == 0


@pytest.fixture
def engine(shared: ServerEngine) -> ServerEngine:
    """The shared engine, whose server has dropped its records of earlier tests."""
    ask(shared, "/forget")
    return shared


vllm_alone = pytest.mark.parametrize("dialect", ["vllm"], indirect=True, scope="module")
"""Selects one dialect for tests of the parts that all dialects share."""


def asked(name: str, prompt: list[int], count: int = ENDLESS, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_ids=prompt,
        sampling=SamplingParams(max_new_tokens=count, temperature=0.0, **sampling),
    )


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        # No event reports it
        while not (await found if inspect.isawaitable(found := condition()) else found):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def server_has(engine: ServerEngine, num_running: int) -> bool:
    return (await engine.stats())["num_running"] == num_running


def num_tokens(engine: ServerEngine) -> dict[str, int]:
    return {name: len(sequence.tokens) for name, sequence in engine._served().generations.items()}


async def begun(engine: ServerEngine, *names: str) -> list[asyncio.Task[GenerationResult]]:
    """Start endless requests, and wait until each has some tokens."""
    tasks = [
        asyncio.create_task(engine.agenerate(asked(name, PROMPTS.get(name, [1, 2]))))
        for name in names
    ]
    await until(lambda: min(num_tokens(engine).get(name, 0) for name in names) > 5)
    return tasks


def port_of(engine: ServerEngine) -> int:
    words = psutil.Process(engine.server_pid()).cmdline()
    return int(words[words.index("--port") + 1])


def ask(engine: ServerEngine, route: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request of the test itself to the server, a POST if it has a body."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port_of(engine)}{route}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.loads(answer.read() or b"null")


def connections_to(port: int) -> list[Any]:
    """Return the TCP connections of this process to a port."""
    found = psutil.Process().net_connections("tcp")
    return [each for each in found if each.raddr and each.raddr.port == port]


def seen(engine: ServerEngine, route: str = "") -> Any:
    """Return the requests that the server has recorded."""
    found = ask(engine, "/seen")
    return [each for each in found["requests"] if each["route"] == route] if route else found


def generations(engine: ServerEngine) -> list[dict[str, Any]]:
    return [*seen(engine, "/v1/completions"), *seen(engine, "/generate")]


def require(result: GenerationResult, prompt: list[int], weight: float = 0.0) -> None:
    tokens, logprobs = continuation(prompt, len(result.token_ids), weight)
    assert result.token_ids == tokens
    assert result.logprobs == pytest.approx(logprobs)


async def test_agenerate_many_requests_few_connections(engine: ServerEngine) -> None:
    prompts = {f"r{i}": [i, i + 1] for i in range(12)}
    before = (await engine.stats())["num_generated_tokens"]
    for _ in range(3):
        results = await asyncio.gather(
            *(engine.agenerate(asked(name, prompt, 10)) for name, prompt in prompts.items())
        )
        for result in results:
            require(result, prompts[result.request_id])
            assert (result.stop_reason, len(result.token_ids), set(result.versions)) == (
                "length",
                10,
                {0},
            )
    idle = {"num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.25, "version": 0}
    assert await engine.stats() == {**idle, "num_generated_tokens": before + 360}
    assert len(generations(engine)) == 36
    assert seen(engine)["connections"] <= 12


async def test_agenerate_stop_token(engine: ServerEngine) -> None:
    tokens, _ = continuation([1, 2, 3], 5, 0.0)
    result = await engine.agenerate(asked("a", [1, 2, 3], stop_token_ids=(tokens[2],)))
    assert (result.token_ids, result.stop_reason) == (tokens[:3], "stop")


async def test_agenerate_max_model_len(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, max_model_len=20) as engine:
        result = await engine.agenerate(asked("a", [1, 2, 3], 500))
        assert (len(result.token_ids), result.stop_reason) == (17, "length")
        for wrong, reason in (
            ([1] * 20, "leaves no room"),
            ([], "empty"),
            ([3, 50], "token 50"),
            ([-1], "token -1"),
        ):
            with pytest.raises(ValueError, match=reason):
                await engine.agenerate(asked("b", wrong))


async def test_agenerate_sampling_parameters(engine: ServerEngine, dialect: str) -> None:
    sampling = SamplingParams(
        max_new_tokens=3, temperature=0.5, top_k=7, top_p=0.9, seed=11, stop_token_ids=(4,)
    )
    for begun in (0, 1):
        request = GenerationRequest(
            request_id="a", prompt_ids=[1, 2], sampling=sampling, num_generated=begun
        )
        await engine.agenerate(request)
    first, second = (each["body"] for each in generations(engine))
    params = first if dialect == "vllm" else first["sampling_params"]
    assert (params["temperature"], params["top_k"], params["top_p"], params["ignore_eos"]) == (
        0.5,
        7,
        0.9,
        True,
    )
    assert params["stop_token_ids"] == [4]
    seeds = [
        each["seed"] if dialect == "vllm" else each["sampling_params"]["sampling_seed"]
        for each in (first, second)
    ]
    assert seeds[0] == 11
    assert seeds[1] != 11  # the numbers of the first token are not drawn again
    assert 0 <= seeds[1] < 2**63


@vllm_alone
@pytest.mark.parametrize(("seeds", "num_requests"), [((None, None, None), 1), ((5, 6, 7), 3)])
async def test_agenerate_samples_num_requests(
    seeds: tuple[int | None, ...], num_requests: int, engine: ServerEngine
) -> None:
    requests = [asked(f"a#{index}", [1, 2], 6, seed=seed) for index, seed in enumerate(seeds)]
    results = await engine.agenerate_samples(requests)
    assert [result.request_id for result in results] == ["a#0", "a#1", "a#2"]
    for result in results:
        require(result, [1, 2])
    assert len(generations(engine)) == num_requests
    with pytest.raises(ValueError, match="different prompts"):
        await engine.agenerate_samples([asked("b", [1]), asked("c", [2])])


async def test_abort_keeps_partial_results(engine: ServerEngine) -> None:
    tasks = await begun(engine, "a", "b", "c")
    assert await engine.abort(["a", "unknown"]) == 1
    first = await tasks[0]
    assert first.stop_reason == "abort"
    assert len(first.token_ids) > 5
    require(first, [1, 2])
    await until(lambda: server_has(engine, 2))
    assert not tasks[1].done()
    assert await engine.abort() == 2
    assert [(await task).stop_reason for task in tasks[1:]] == ["abort"] * 2


async def test_agenerate_cancelled(engine: ServerEngine, dialect: str) -> None:
    (task,) = await begun(engine, "a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if dialect == "vllm":  # the little server detects a closed connection in this dialect only
        await until(lambda: server_has(engine, 0))
    require(await engine.agenerate(asked("a", [1, 2], 5)), [1, 2])


@vllm_alone
async def test_destroy_during_hanging_update(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, stop_timeout_s=0.5) as engine:
        (task,) = await begun(engine, "a")
        stop(engine.server_pid())
        update = asyncio.create_task(engine.update_weights(tensors_of(1.0), 1))
        await until(lambda: engine._served().is_held)  # it asks the server to pause
        await asyncio.to_thread(engine.destroy)
        assert (await task).stop_reason == "abort"
        with pytest.raises(ServerLostError):
            await asyncio.wait_for(update, LIMIT_S)
        with pytest.raises(RuntimeError, match="not running"):
            await engine.agenerate(asked("b", [1, 2]))


# --- what may be sent again -----------------------------------------------------------------------


async def test_agenerate_retries_busy_server(engine: ServerEngine) -> None:
    ask(engine, "/refuse", {"count": 3})
    require(await engine.agenerate(asked("a", [1, 2], 5)), [1, 2])
    assert len(generations(engine)) == 4


@vllm_alone
async def test_agenerate_server_stays_busy(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, retry_s=0.3) as engine:
        ask(engine, "/refuse", {"count": 1000})
        with pytest.raises(ServerRequestError, match="busy") as raised:
            await engine.agenerate(asked("a", [1, 2], 5))
        assert raised.value.status == 503


async def test_agenerate_server_dies(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path) as engine:
        tasks = await begun(engine, "a", "b")
        assert len(generations(engine)) == 2
        assert engine.failure() is None
        os.kill(engine.server_pid(), signal.SIGKILL)
        for task in tasks:
            with pytest.raises(ServerLostError, match="SIGKILL") as raised:
                await task
            assert raised.value.exit_code == -signal.SIGKILL
            assert "listening on" in raised.value.log_tail
        assert "SIGKILL" in str(engine.failure())
        with pytest.raises(ServerLostError):
            await engine.agenerate(asked("c", [1, 2]))


NO_ANSWERS = {
    "vllm": [
        ([49, 49], "refused"),
        ([49, 48], "log-probabilities"),
        ([49, 47], "sample -1"),
        ([49, 46], "truncated"),
        ([49, 44], "the events ended before the sequences did"),
    ],
    "sglang": [([49, 49], "this prompt is refused")],
}


async def test_agenerate_malformed_answers(engine: ServerEngine, dialect: str) -> None:
    for prompt, reason in NO_ANSWERS[dialect]:
        with pytest.raises(ServerRequestError) as raised:
            await engine.agenerate(asked("a", prompt, 5))
        assert reason in raised.value.answer
    require(await engine.agenerate(asked("a", [1, 2], 5)), [1, 2])


@vllm_alone
async def test_agenerate_broken_connection(engine: ServerEngine) -> None:
    with pytest.raises(ServerLostError, match="/v1/completions") as raised:
        await engine.agenerate(asked("a", [49, 45], 5))
    assert raised.value.exit_code is None
    assert len(generations(engine)) == 1


@vllm_alone
async def test_destroy_closes_connections(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path) as engine:
        await engine.stats()
        port = port_of(engine)
        assert connections_to(port)
        await asyncio.to_thread(engine.destroy)
        assert not connections_to(port)


async def test_destroy_during_retries(tmp_path: Path) -> None:
    async with running("vllm", tmp_path) as engine:
        port = port_of(engine)
        ask(engine, "/refuse", {"count": 10**6})
        call = asyncio.create_task(engine.agenerate(asked("a", [1, 2])))
        await until(lambda: generations(engine))
        await asyncio.to_thread(engine.destroy)
        assert (await call).stop_reason == "abort"
        assert not connections_to(port)


async def test_agenerate_id_in_flight_once(engine: ServerEngine) -> None:
    (task,) = await begun(engine, "a")
    with pytest.raises(ValueError, match="already in flight"):
        await engine.agenerate(asked("a", [1, 2]))
    await engine.abort()
    await task


# --- weights --------------------------------------------------------------------------------------


def weights_of(form: str, folder: Path, weight: float) -> Any:
    if form == "disk":
        return WeightsOnDisk(write_model(folder / f"model-{weight}", weight))
    tensors = tensors_of(weight)
    if form == "mapping":
        return tensors
    return WeightsInMemory(tensors, {name: checksum_of(tensor) for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("dialect", "form"),
    [("vllm", "disk"), ("vllm", "mapping"), ("sglang", "disk"), ("sglang", "memory")],
    indirect=["dialect"],
    scope="module",
)
async def test_update_weights_during_requests(dialect: str, form: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path) as engine:
        tasks = await begun(engine, *PROMPTS)
        assert await engine.update_weights(weights_of(form, tmp_path, 1.0), 3) == 3
        assert engine.get_version() == 3
        before = num_tokens(engine)
        await until(lambda: min(num_tokens(engine)[name] - before[name] for name in before) > 5)
        await engine.abort()
        for prompt, task in zip(PROMPTS.values(), tasks, strict=True):
            result = await task
            num_old = result.versions.count(0)
            assert result.versions == [0] * num_old + [3] * (len(result.versions) - num_old)
            assert num_old > 5
            assert len(result.versions) - num_old > 5
            old_tokens, old_logprobs = continuation(prompt, num_old, 0.0)
            new_tokens, new_logprobs = continuation(
                [*prompt, *old_tokens], len(result.token_ids) - num_old, 1.0
            )
            assert result.token_ids == [*old_tokens, *new_tokens]
            assert result.logprobs == pytest.approx([*old_logprobs, *new_logprobs])
        require(await engine.agenerate(asked("c", [3, 4], 5)), [3, 4], 1.0)
        assert not os.listdir(engine._exchange)  # the files of the update have been removed


async def test_update_weights_before_first_token(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, "--held") as engine:
        task = asyncio.create_task(engine.agenerate(asked("a", [1, 2], 1)))
        await until(lambda: server_has(engine, 1))
        await engine.update_weights(weights_of("mapping", tmp_path, 1.0), 1)
        result = await task
        assert (result.stop_reason, result.versions) == ("length", [1])
        require(result, [1, 2], 1.0)


async def test_update_weights_during_samples(tmp_path: Path) -> None:
    async with running("vllm", tmp_path) as engine:
        task = asyncio.create_task(
            engine.agenerate_samples([asked("a#0", [1, 2]), asked("a#1", [1, 2])])
        )
        await until(lambda: num_tokens(engine).get("a#0", 0) > 5)
        await engine.update_weights(weights_of("mapping", tmp_path, 1.0), 1)
        before = num_tokens(engine)
        await until(lambda: min(num_tokens(engine)[name] - before[name] for name in before) > 5)
        await engine.abort(["a#0"])
        await engine.abort(["a#1"])
        for result in await task:
            assert result.stop_reason == "abort"
            assert result.versions == sorted(result.versions)
            assert result.versions[-1] == 1


async def test_update_weights_unfit(engine: ServerEngine) -> None:
    (task,) = await begun(engine, "a")
    right, name = tensors_of(1.0), "model.norm.weight"
    with pytest.raises(
        ValueError, match=r"1 of another shape: model.norm.weight \(5,\) for \(4,\)"
    ):
        await engine.update_weights({**right, name: torch.zeros(5)}, 1)
    with pytest.raises(ValueError, match="1 missing: model.norm.weight; 1 unexpected: other"):
        await engine.update_weights(
            {"other" if key == name else key: tensor for key, tensor in right.items()}, 1
        )
    with pytest.raises(ValueError, match="CRC-32"):
        await engine.update_weights(WeightsInMemory(right, {name: 1}), 1)
    assert not task.done()
    await engine.abort()
    result = await task
    assert set(result.versions) == {0}
    require(result, [1, 2])
    assert not seen(engine, "/pause")
    assert not seen(engine, "/pause_generation")


async def test_update_weights_torn_holds_requests(dialect: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "torn", math.nan)
    async with running(dialect, tmp_path) as engine:
        tasks = await begun(engine, "a", "b")
        with pytest.raises(PartialWeightUpdateError, match="a tensor is torn"):
            await engine.update_weights(WeightsOnDisk(model), 1)
        assert engine.get_version() == 0
        late = asyncio.create_task(engine.agenerate(asked("late", [3])))
        await until(lambda: "late" in num_tokens(engine))
        before = num_tokens(engine)
        assert await engine.abort(["a"]) == 1  # the request is returned
        assert (await tasks[0]).stop_reason == "abort"
        num_sent = len(generations(engine))
        assert await engine.update_weights(weights_of("disk", tmp_path, 2.0), 2) == 2
        await until(
            lambda: num_tokens(engine)["b"] > before["b"] + 5 and num_tokens(engine)["late"] > 5
        )
        assert num_sent == 2  # no request was sent in between
        await engine.abort()
        result = await late
        assert set(result.versions) == {2}
        require(result, [3], 2.0)
        assert (await tasks[1]).versions[: before["b"]] == [0] * before["b"]


@vllm_alone
async def test_update_weights_torn_then_server_dies(dialect: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "torn", math.nan)
    async with running(dialect, tmp_path) as engine:
        with pytest.raises(PartialWeightUpdateError):
            await engine.update_weights(WeightsOnDisk(model), 1)
        task = asyncio.create_task(engine.agenerate(asked("a", [1, 2])))
        await until(lambda: "a" in num_tokens(engine))
        os.kill(engine.server_pid(), signal.SIGKILL)
        with pytest.raises(ServerLostError):
            await asyncio.wait_for(task, LIMIT_S)


# --- adapters -------------------------------------------------------------------------------------

ADAPTERS = {"max_lora_rank": 4, "max_loras": 3}


async def gained(engine: ServerEngine, *names: str) -> None:
    """Wait until each of these requests has some more tokens."""
    before = num_tokens(engine)
    await until(lambda: min(num_tokens(engine)[name] - before[name] for name in names) > 5)


async def ended(
    engine: ServerEngine, name: str, task: asyncio.Task[GenerationResult], num_left: int
) -> GenerationResult:
    """Abort a request, and wait until the server has ended it."""
    await engine.abort([name])
    await until(lambda: server_has(engine, num_left))
    return await task


def loaded(engine: ServerEngine) -> list[str]:
    """Return the adapters that the server was asked to load, less those to unload."""
    names = [each["body"]["lora_name"] for each in route_of(engine, "load_lora_adapter")]
    for each in route_of(engine, "unload_lora_adapter"):
        names.remove(each["body"]["lora_name"])
    return names


def route_of(engine: ServerEngine, name: str) -> list[dict[str, Any]]:
    return [*seen(engine, f"/v1/{name}"), *seen(engine, f"/{name}")]


def require_of(result: GenerationResult, prompt: list[int], *parts: tuple[int, float]) -> None:
    """Require versions in this order, each with its weight; each has a token."""
    assert list(dict.fromkeys(result.versions)) == [version for version, _ in parts]
    assert result.versions == sorted(result.versions)
    cut: list[int] = [*prompt]
    logprobs: list[float] = []
    for version, weight in parts:
        made, known = continuation(cut, result.versions.count(version), weight)
        cut, logprobs = cut + made, logprobs + known
    assert [*prompt, *result.token_ids] == cut
    assert result.logprobs == pytest.approx(logprobs)


async def test_adapters_beside_requests(dialect: str, tmp_path: Path) -> None:
    """Requests end under the adapter that they began with, or the base model; none is paused."""
    async with running(dialect, tmp_path, **ADAPTERS) as engine:
        words = psutil.Process(engine.server_pid()).cmdline()
        assert words[words.index("--max-lora-rank") + 1] == "4"
        number = "--max-loras" if dialect == "vllm" else "--max-loras-per-batch"
        assert words[words.index(number) + 1] == ("3" if dialect == "vllm" else "4")
        tasks = await begun(engine, "a")
        for version, name in enumerate("bcd", 1):
            assert await engine.update_weights(adapter_of(version / 8), version) == version
            tasks += await begun(engine, name)
        await gained(engine, *"abcd")
        assert [name.partition(".")[0] for name in loaded(engine)] == [
            "version-1",
            "version-2",
            "version-3",
        ]
        require_of(await ended(engine, "a", tasks[0], 3), [1, 2], (0, 0.0))
        require_of(await ended(engine, "c", tasks[2], 2), [1, 2], (2, 0.25))
        assert await engine.update_weights(adapter_of(0.5), 3) == 3  # a version comes again
        assert sorted(os.listdir(engine._exchange)) == sorted(loaded(engine))
        assert [name.partition(".")[0] for name in loaded(engine)] == [
            "version-1",
            "version-3",
            "version-3",
        ]
        await gained(engine, "b", "d")
        require_of(await ended(engine, "b", tasks[1], 1), PROMPTS["b"], (1, 0.125))
        require_of(await ended(engine, "d", tasks[3], 0), [1, 2], (3, 0.375))
        require_of(await engine.agenerate(asked("e", [3], 8)), [3], (3, 0.5))
        assert not seen(engine, "/pause")
        assert not seen(engine, "/pause_generation")


async def test_adapter_of_samples(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, **ADAPTERS) as engine:
        await engine.update_weights(adapter_of(0.125), 1)
        requests = [asked(f"a#{index}", [1, 2], 6) for index in range(3)]
        for result in await engine.agenerate_samples(requests):
            require_of(result, [1, 2], (1, 0.125))


async def test_attempt_repeated_with_its_adapter(dialect: str, tmp_path: Path) -> None:
    """The server ends requests at a pause, which fails: they continue with their adapters."""
    async with running(dialect, tmp_path, **ADAPTERS) as engine:
        await engine.update_weights(adapter_of(0.125), 1)
        (task,) = await begun(engine, "a")
        await engine.update_weights(adapter_of(0.25), 2)
        ask(engine, "/fail-to-pause")
        with pytest.raises(ServerRequestError, match="it paused, and then failed"):
            await engine.update_weights(tensors_of(1.0), 3)
        await gained(engine, "a")
        assert len(generations(engine)) == 2
        require_of(await ended(engine, "a", task, 0), [1, 2], (1, 0.125))
        require_of(await engine.agenerate(asked("b", [3], 8)), [3], (2, 0.25))


async def test_whole_model_ends_adapters(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, **ADAPTERS) as engine:
        tasks = await begun(engine, "a")
        await engine.update_weights(adapter_of(0.125), 1)
        tasks += await begun(engine, "b")
        await engine.update_weights(adapter_of(0.25), 2)
        await engine.update_weights(tensors_of(1.0), 3)
        assert not loaded(engine)
        assert not os.listdir(engine._exchange)
        await gained(engine, "a", "b")
        await engine.update_weights(adapter_of(0.5), 4)
        await gained(engine, "a", "b")
        require_of(await ended(engine, "a", tasks[0], 1), [1, 2], (0, 0.0), (3, 1.0))
        require_of(await ended(engine, "b", tasks[1], 0), [5], (1, 0.125), (3, 1.0))
        require_of(await engine.agenerate(asked("c", [3], 8)), [3], (4, 1.5))


async def test_adapters_refused(engine: ServerEngine, dialect: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"of rank 2 arrived.*max_lora_rank is 0, for none; exp"):
        await engine.update_weights(adapter_of(0.125), 1)
    async with running(dialect, tmp_path, **ADAPTERS) as engine:
        with pytest.raises(ValueError, match=r"rank 5 arrived.*rank is 4; expected 5 or more"):
            await engine.update_weights(adapter_of(0.125, rank=5), 1)
        await engine.update_weights(adapter_of(0.125), 1)
        with pytest.raises(ServerRequestError, match="a tensor is torn"):
            await engine.update_weights(adapter_of(math.nan), 2)
        assert os.listdir(engine._exchange) == ["version-1.1"]
        require_of(await engine.agenerate(asked("a", [3], 8)), [3], (1, 0.125))
        with pytest.raises(PartialWeightUpdateError):
            await engine.update_weights(WeightsOnDisk(write_model(tmp_path / "torn", math.nan)), 2)
        with pytest.raises(RuntimeError, match="the base model's weights are gone"):
            await engine.update_weights(adapter_of(0.25), 3)


async def test_adapter_over_random_weights_refused(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, "--load-format=dummy", **ADAPTERS) as engine:
        with pytest.raises(ValueError, match="the base model's weights are random"):
            await engine.update_weights(adapter_of(0.125), 1)
        await engine.update_weights(tensors_of(1.0), 1)
        await engine.update_weights(adapter_of(0.125), 2)
        require_of(await engine.agenerate(asked("a", [3], 8)), [3], (2, 1.125))


async def test_adapters_and_sleep(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, sleep=True, **ADAPTERS) as engine:
        await engine.update_weights(adapter_of(0.125), 1)
        await engine.sleep()
        await engine.wake(weights_only=True)
        await engine.update_weights(adapter_of(0.25), 2)
        await engine.wake()
        require_of(await engine.agenerate(asked("a", [3], 8)), [3], (2, 0.25))
        await engine.sleep(level=2)
        await engine.wake(weights_only=True)
        with pytest.raises(RuntimeError, match="sleep at level 1, or send the whole model"):
            await engine.update_weights(adapter_of(0.5), 3)
        await engine.update_weights(tensors_of(1.0), 3)
        await engine.wake()
        require_of(await engine.agenerate(asked("a", [3], 8)), [3], (3, 1.0))


async def test_policies_on_one_server(dialect: str, tmp_path: Path) -> None:
    """Each has its own versions and requests; ids may be the same."""
    async with running(dialect, tmp_path, sleep=True, **ADAPTERS) as engine:
        other = engine.beside()
        tasks = await begun(engine, "a")
        await engine.update_weights(adapter_of(0.125), 1)
        assert await other.update_weights(adapter_of(0.5), 7) == 7
        tasks += [asyncio.create_task(other.agenerate(asked("a", [1, 2])))]
        tasks += await begun(engine, "b")
        await until(lambda: num_tokens(other).get("a", 0) > 5)
        await other.update_weights(adapter_of(1.0), 8)
        await engine.update_weights(adapter_of(0.25), 2)
        assert (engine.get_version(), other.get_version()) == (2, 8)
        for policy in (engine, other):
            with pytest.raises(ValueError, match="a whole model would change .*adapters=True"):
                await policy.update_weights(tensors_of(1.0), 9)
            with pytest.raises(ValueError, match=r"^sleep\(\) would change the base model of this"):
                await policy.sleep()
        require_of(await ended(engine, "a", tasks[0], 2), [1, 2], (0, 0.0))
        assert await other.abort(["a"]) == 1
        require_of(await tasks[1], [1, 2], (7, 0.5))
        require_of(await ended(engine, "b", tasks[2], 0), [5], (1, 0.125))
        samples = await other.agenerate_samples([asked(f"c#{each}", [3], 6) for each in range(2)])
        for result in samples:
            require_of(result, [3], (8, 1.0))
        tasks = await begun(engine, "e") + [asyncio.create_task(other.agenerate(asked("e", [1])))]
        await until(lambda: num_tokens(other).get("e", 0) > 0)
        assert await engine.abort(["e"]) == 1
        before = num_tokens(other)["e"]
        await until(lambda: num_tokens(other)["e"] > before + 5)
        await other.abort(["e"])
        assert [(await task).stop_reason for task in tasks] == ["abort"] * 2
        names = [each["request_id"] for each in generations(engine) if "request_id" in each]
        assert len(set(names)) == len(names)
        third = engine.beside()
        with pytest.raises(ValueError, match=r"max_loras is 3 for 4 policies; expected the sum"):
            engine.beside()
        for policy in (other, third):
            task = asyncio.create_task(policy.agenerate(asked("d", [1, 2])))
            await until(lambda: server_has(engine, 1))
            await asyncio.to_thread(policy.destroy)
            assert (await task).stop_reason == "abort"
            await until(lambda: server_has(engine, 0))
        await engine.update_weights(adapter_of(0.5), 3)
        assert [name.partition(".")[0] for name in loaded(engine)] == ["version-3"]
        assert sorted(os.listdir(engine._exchange)) == loaded(engine)
        await engine.update_weights(tensors_of(1.0), 9)
        with pytest.raises(ValueError, match="has slept or received a whole model; start"):
            engine.beside()


async def test_policy_that_ends_unused(dialect: str, tmp_path: Path) -> None:
    """The first policy takes a whole model again, and still has its server."""
    async with running(dialect, tmp_path, **ADAPTERS) as engine:
        other = engine.beside()
        await asyncio.to_thread(other.destroy)
        await asyncio.to_thread(other.destroy)
        await engine.update_weights(tensors_of(1.0), 1)
        require_of(await engine.agenerate(asked("a", [3], 8)), [3], (1, 1.0))


async def test_policies_of_a_lost_server(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, **ADAPTERS) as engine:
        other = engine.beside()
        assert other.failure() is None
        os.kill(engine.server_pid(), signal.SIGKILL)
        await until(lambda: other.failure() is not None)
        assert "its inference server has ended" in str(other.failure())


# --- sleep ----------------------------------------------------------------------------------------


async def test_sleep_and_wake(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, sleep=True) as engine:
        (task,) = await begun(engine, "a")
        with pytest.raises(RuntimeError, match="in flight"):
            await engine.sleep()
        await engine.abort()
        await task
        await engine.sleep()
        await engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            await engine.agenerate(asked("b", [1, 2], 5))
        with pytest.raises(RuntimeError, match="weights_only"):
            await engine.update_weights(weights_of("mapping", tmp_path, 1.0), 1)
        await engine.wake()
        require(await engine.agenerate(asked("b", [1, 2], 5)), [1, 2])

        await engine.sleep(level=2)
        await engine.wake(weights_only=True)
        with pytest.raises(RuntimeError, match="weights alone"):
            await engine.agenerate(asked("b", [1, 2], 5))
        await engine.update_weights(weights_of("mapping", tmp_path, 1.0), 1)
        await engine.wake()
        await engine.wake()
        require(await engine.agenerate(asked("b", [1, 2], 5)), [1, 2], 1.0)
        asleep, awake = (
            ("/sleep", "/wake_up")
            if dialect == "vllm"
            else ("/release_memory_occupation", "/resume_memory_occupation")
        )
        assert len(seen(engine, asleep)) == 2
        told = [each["params"] or each["body"] for each in seen(engine, awake)]
        if dialect == "vllm":
            assert [each["params"]["level"] for each in seen(engine, asleep)] == ["1", "2"]
            assert told == [{"tags": tag} for tag in ("weights", "kv_cache", "weights", "kv_cache")]
        else:
            assert told == [
                {"tags": ["weights", "kv_cache"]},
                {"tags": ["weights"]},
                {"tags": ["kv_cache"]},
            ]


@vllm_alone
async def test_wake_without_weights_holds_requests(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, sleep=True) as engine:
        await engine.sleep()
        await engine.sleep(level=2)
        await engine.wake()
        task = asyncio.create_task(engine.agenerate(asked("a", [1, 2], 5)))
        await until(lambda: "a" in num_tokens(engine))
        assert not generations(engine)
        await engine.update_weights(weights_of("mapping", tmp_path, 1.0), 1)
        require(await task, [1, 2], 1.0)


@vllm_alone
async def test_server_dies_then_update_and_sleep(dialect: str, tmp_path: Path) -> None:
    async with running(dialect, tmp_path, sleep=True) as engine:
        await engine.stats()
        os.kill(engine.server_pid(), signal.SIGKILL)
        # The end of the server is detected later than the end of its folder.
        await until(lambda: not os.path.isdir(engine._exchange))
        with pytest.raises(ServerLostError, match="SIGKILL"):
            await engine.update_weights(tensors_of(1.0), 1)
        with pytest.raises(ServerLostError, match="SIGKILL"):
            await engine.sleep()
        for call in (
            engine.agenerate(asked("a", [1, 2], 5)),
            engine.agenerate_samples([asked("a", [1, 2], 5)]),
            engine.update_weights(tensors_of(1.0), 1),
            engine.wake(),
        ):
            with pytest.raises(ServerLostError, match="SIGKILL"):
                await call


async def test_sleep_not_enabled(engine: ServerEngine) -> None:
    with pytest.raises(RuntimeError, match=r"ServerConfig\.sleep"):
        await engine.sleep()
    with pytest.raises(ValueError, match="level is 3"):
        await engine.sleep(level=3)
