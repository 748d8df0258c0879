"""One ServerEngine in this process, whose server is vLLM's on the CPU: requests, weights, ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest

from helmsman.api.errors import ServerLostError, ServerStartError
from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams
from helmsman.api.weights import WeightsInMemory, WeightsOnDisk
from helmsman.api.workers import WorkerContext, within
from helmsman.engines._server.weights import write_folder
from helmsman.engines.server_engine import ServerEngine
from helmsman.engines.weight_transfer import checksum_of
from helmsman.rpc_server.ports import PortLeases
from tests.contract.helpers import wait_until
from tests.processes import command_of
from tests.vllm.vllm_models import (
    LLAMA,
    MAX_LEN,
    SPEC_ENV,
    VOCAB,
    differences,
    folder_of,
    is_greedy,
    model_of,
    report,
    weights_of,
)

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=32)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [100]]
LONG = msgspec.structs.replace(GREEDY, max_new_tokens=200)
WAIT_S = 180.0

pytestmark = pytest.mark.timeout(400)  # a server starts within one


class Served:
    """The engine, with a loop as its worker has one, and the model whose weights it was last brought."""

    def __init__(self, engine: ServerEngine, model: Any) -> None:
        self.engine, self.model = engine, model
        self._numbers = iter(range(10**9))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def begin(self, request: GenerationRequest) -> Any:
        return asyncio.run_coroutine_threadsafe(self.engine.agenerate(request), self._loop)

    def request(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **fields: Any) -> GenerationRequest:
        return GenerationRequest(request_id=f"r{next(self._numbers)}", prompt_ids=list(prompt), sampling=sampling, **fields)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY) -> list[GenerationResult]:
        futures = [self.begin(self.request(prompt, sampling)) for prompt in prompts]
        return [future.result(WAIT_S) for future in futures]

    def have(self, num: int) -> Callable[[], bool]:
        """Whether what is in flight has so many tokens each, and so many requests are."""
        return lambda: all(len(each.tokens) >= num for each in self.engine._served().sequences.values())

    def require_the_models(self, what: str) -> None:
        results = self.generate(PROMPTS)
        assert all(is_greedy(self.model, prompt, each.token_ids) for prompt, each in zip(PROMPTS, results, strict=True))
        found = differences(self.model, PROMPTS, results)
        report(what, found)
        assert found.max() < 1e-3
        assert {each.stop_reason for each in results} == {"length"}
        assert {version for each in results for version in each.versions} == {self.engine.get_version()}


@pytest.fixture(scope="module")
def leases() -> Iterator[PortLeases]:
    leases = PortLeases()
    yield leases
    leases.close()


def engine_of(leases: PortLeases, model: str, *args: str) -> ServerEngine:
    with within(WorkerContext(worker_id="rollout/0", node="127.0.0.1", ports=(leases.lease(1)[0],))):
        return ServerEngine(
            model=model,
            dtype="float32",
            max_model_len=MAX_LEN,
            args=("--enforce-eager", *args),
            env=SPEC_ENV,
            start_timeout_s=300.0,
        )


@pytest.fixture(scope="module")
def served(leases: PortLeases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = model_of(LLAMA, seed=1)
    engine = engine_of(leases, folder_of(model, tmp_path_factory.mktemp("llama")))
    engine.initialize()
    yield Served(engine, model)
    engine.destroy()


# --- requests -----------------------------------------------------------------------------------------------------------------


def test_greedy_tokens_and_log_probabilities_are_the_models(served: Served) -> None:
    served.require_the_models("float32")


def test_log_probabilities_are_those_at_temperature_1_without_filters(served: Served) -> None:
    drawn = SamplingParams(temperature=0.5, top_k=20, top_p=0.9, seed=3, max_new_tokens=64)
    assert differences(served.model, PROMPTS, served.generate(PROMPTS, drawn)).max() < 1e-3


def test_a_stop_token_ends_the_sequence_and_is_part_of_it(served: Served) -> None:
    (whole,) = served.generate(PROMPTS[:1])
    stop = whole.token_ids[9]
    (cut,) = served.generate(PROMPTS[:1], msgspec.structs.replace(GREEDY, stop_token_ids=(stop,)))
    first = whole.token_ids.index(stop)
    assert (cut.token_ids, cut.stop_reason) == (whole.token_ids[: first + 1], "stop")


def test_a_sequence_ends_at_the_longest_that_the_server_takes(served: Served) -> None:
    (result,) = served.generate([[1] * (MAX_LEN - 3)])
    assert (len(result.token_ids), result.stop_reason) == (3, "length")
    with pytest.raises(ValueError, match=f"token {VOCAB}"):
        served.generate([[VOCAB]])


def test_a_seed_decides_the_tokens_in_any_company(served: Served) -> None:
    drawn = SamplingParams(seed=2**64 - 1, max_new_tokens=24)
    (alone,) = served.generate(PROMPTS[:1], drawn)
    among = served.generate([*PROMPTS, *PROMPTS], drawn)
    assert among[0].token_ids == alone.token_ids
    (other,) = served.generate(PROMPTS[:1], msgspec.structs.replace(drawn, seed=8))
    assert other.token_ids != alone.token_ids


def test_samples_of_one_request_are_several(served: Served) -> None:
    requests = [served.request(PROMPTS[0], SamplingParams(max_new_tokens=24)) for _ in range(4)]
    results = served.run(served.engine.agenerate_samples(requests))
    assert [each.request_id for each in results] == [each.request_id for each in requests]
    assert len({tuple(each.token_ids) for each in results}) == 4
    assert differences(served.model, [PROMPTS[0]] * 4, results).max() < 1e-3


def test_an_aborted_request_keeps_what_it_has_and_the_server_stops_it(served: Served) -> None:
    request, other = served.request(PROMPTS[0], LONG), served.request(PROMPTS[1], LONG)
    future, second = served.begin(request), served.begin(other)
    wait_until(lambda: len(served.engine._served().sequences) == 2 and served.have(8)(), "both have tokens", limit_s=WAIT_S)
    assert served.run(served.engine.abort([request.request_id])) == 1
    result = future.result(WAIT_S)
    assert result.stop_reason == "abort"
    assert 8 <= len(result.token_ids) < LONG.max_new_tokens
    assert is_greedy(served.model, PROMPTS[0], result.token_ids)
    wait_until(lambda: served.run(served.engine.stats())["num_running"] == 1, "the server has stopped it", limit_s=WAIT_S)
    served.run(served.engine.abort())
    assert second.result(WAIT_S).stop_reason == "abort"
    wait_until(lambda: served.run(served.engine.stats())["num_running"] == 0, "it has stopped both", limit_s=WAIT_S)


# --- weights ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["disk", "mapping", "memory with checksums"])
def test_an_update_is_served_and_what_runs_goes_on_by_it(served: Served, form: str, tmp_path: Path) -> None:
    old, new = served.model, model_of(LLAMA, seed=10 + served.engine.get_version())
    before = served.engine.get_version()
    futures = [served.begin(served.request(prompt, LONG)) for prompt in PROMPTS]
    wait_until(lambda: len(served.engine._served().sequences) == 3 and served.have(8)(), "all have tokens", limit_s=WAIT_S)
    tensors = weights_of(new)
    weights: Any = tensors
    if form == "disk":
        write_folder([tensors], str(tmp_path))
        weights = WeightsOnDisk(str(tmp_path))
    elif form != "mapping":
        weights = WeightsInMemory(tensors, {name: checksum_of(tensor) for name, tensor in tensors.items()})
    assert served.run(served.engine.update_weights(weights, before + 1)) == before + 1
    served.model = new
    served.require_the_models(form)
    for prompt, future in zip(PROMPTS, futures, strict=True):
        result = future.result(WAIT_S)
        num_old = result.versions.count(before)
        assert result.versions == [before] * num_old + [before + 1] * (LONG.max_new_tokens - num_old)
        assert num_old >= 8
        assert is_greedy(old, prompt, result.token_ids[:num_old])
        cut = [*prompt, *result.token_ids[:num_old]]  # nothing that the old model computed is used afterwards
        after = msgspec.structs.replace(result, token_ids=result.token_ids[num_old:], logprobs=result.logprobs[num_old:])
        assert is_greedy(new, cut, after.token_ids)
        assert differences(new, [cut], [after]).max() < 1e-3
    assert not os.listdir(served.engine._exchange)


def test_weights_that_do_not_fit_change_nothing(served: Served) -> None:
    tensors = weights_of(model_of(LLAMA, seed=90))
    name = "model.layers.1.self_attn.k_proj.weight"
    for wrong, reason in (
        ({key: tensor for key, tensor in tensors.items() if key != name}, f"1 missing: {name}"),
        ({**tensors, name: tensors[name][1:]}, "1 of another shape"),
    ):
        with pytest.raises(ValueError, match=reason):
            served.run(served.engine.update_weights(wrong, 1000))
    served.require_the_models("after a refusal")


# --- ends ---------------------------------------------------------------------------------------------------------------------


def test_vllms_own_words_are_in_the_error_of_a_start(leases: PortLeases, tmp_path: Path) -> None:
    engine = engine_of(leases, str(tmp_path), "--no-such-flag")
    with pytest.raises(ServerStartError, match="no-such-flag") as raised:
        engine.initialize()
    assert raised.value.exit_code == 2
    engine.destroy()


def test_the_death_of_vllms_engine_core_is_the_servers(served: Served) -> None:
    """The last test of this module: it ends what the others share."""
    family = [psutil.Process(served.engine.server_pid()), *psutil.Process(served.engine.server_pid()).children(recursive=True)]
    assert len(family) >= 2
    future = served.begin(served.request(PROMPTS[0], LONG))
    wait_until(lambda: served.engine._served().sequences and served.have(4)(), "it has tokens", limit_s=WAIT_S)
    os.kill(next(each.pid for each in family[1:] if "EngineCore" in command_of(each)), signal.SIGKILL)
    with pytest.raises(ServerLostError):
        future.result(WAIT_S)
    wait_until(lambda: served.engine.failure() is not None, "its server has ended", limit_s=WAIT_S)
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
