"""Tests of rollout engines on vLLM, which a module runs on the engine of its fixture ``served``."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from helmsman.api.generation import SamplingParams
from helmsman.api.weights import WeightsInMemory, WeightsOnDisk
from helmsman.engines._weights.sending import checksum_of
from tests.vllm.vllm_models import (
    LLAMA,
    MAX_LEN,
    VOCAB,
    differences,
    is_greedy,
    model_of,
    weights_of,
)
from tests.vllm.vllm_served import GREEDY, PROMPTS, Served, require_the_trainers, written

LONG = MAX_LEN - 8


class EngineSuite:
    @pytest.mark.ci
    async def test_generate_greedy_matches_model(self, served: Served) -> None:
        results = await served.generate(PROMPTS)
        assert {each.stop_reason for each in results} == {"length"}
        await require_the_trainers(served, "float32")

    @pytest.mark.ci
    async def test_generate_logprobs_unfiltered(self, served: Served) -> None:
        drawn = SamplingParams(temperature=0.5, top_k=20, top_p=0.9, seed=3, max_new_tokens=64)
        results = await served.generate(PROMPTS, drawn)
        assert differences(served.model, PROMPTS, results).max() < 1e-3

    @pytest.mark.ci
    async def test_generate_stop_token(self, served: Served) -> None:
        (whole,) = await served.generate(PROMPTS[:1])
        stop = whole.token_ids[9]
        (cut,) = await served.generate(
            PROMPTS[:1], msgspec.structs.replace(GREEDY, stop_token_ids=(stop,))
        )
        first = whole.token_ids.index(stop)
        assert (cut.token_ids, cut.stop_reason) == (whole.token_ids[: first + 1], "stop")
        assert len(cut.logprobs) == len(cut.token_ids)

    async def test_generate_longest_sequence(self, served: Served) -> None:
        (result,) = await served.generate([[1] * (MAX_LEN - 3)])
        assert (len(result.token_ids), result.stop_reason) == (3, "length")

    async def test_generate_seed_decides_tokens(self, served: Served) -> None:
        drawn = SamplingParams(seed=2**64 - 1, max_new_tokens=24)
        (alone,) = await served.generate(PROMPTS[:1], drawn)
        among = await served.generate([*PROMPTS, *PROMPTS], drawn)
        assert among[0].token_ids == alone.token_ids
        (other,) = await served.generate(PROMPTS[:1], msgspec.structs.replace(drawn, seed=8))
        assert other.token_ids != alone.token_ids

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "empty prompt"),
            ([VOCAB], "has the token 128"),
            ([-1], "has the token -1"),
            ([1] * MAX_LEN, "leaves no room"),
        ],
    )
    async def test_generate_refuses_request(
        self, served: Served, prompt: list[int], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            await served.engine.agenerate(served.request(prompt))

    @pytest.mark.ci
    async def test_abort_returns_tokens(self, served: Served) -> None:
        long = SamplingParams(temperature=0.0, max_new_tokens=LONG)
        kept, ended = served.request([3], long), served.request([4], long)
        tasks = [await served.begun(kept), await served.begun(ended)]
        with pytest.raises(ValueError, match="already in flight"):
            await served.engine.agenerate(kept)
        assert await served.engine.abort([ended.request_id, "unknown"]) == 1
        result = await tasks[1]
        assert result.stop_reason == "abort"
        assert 0 < len(result.token_ids) < LONG
        assert len(result.token_ids) == len(result.logprobs) == len(result.versions)
        assert is_greedy(served.model, [4], result.token_ids)
        assert not tasks[0].done()
        assert await served.engine.abort() == 1
        assert (await tasks[0]).stop_reason == "abort"
        assert await served.engine.abort() == 0

    @pytest.mark.ci
    async def test_update_weights_from_memory(self, served: Served) -> None:
        await served.generate([[1] * 300])  # an update must drop these cached keys and values
        model = model_of(LLAMA, seed=2)
        tensors = weights_of(model)
        weights = WeightsInMemory(
            tensors, {name: checksum_of(tensor) for name, tensor in tensors.items()}
        )
        version = served.engine.get_version() + 1
        assert (
            await served.engine.update_weights(weights, version)
            == served.engine.get_version()
            == version
        )
        served.model = model
        await require_the_trainers(served, "memory")

    @pytest.mark.ci
    async def test_update_weights_from_files(self, served: Served, tmp_path: Path) -> None:
        served_before = served.engine.get_version()
        model = model_of(LLAMA, seed=3)
        assert (
            await served.engine.update_weights(written(model, tmp_path), served_before + 1)
            == served_before + 1
        )
        served.model = model
        await require_the_trainers(served, "files")

    async def test_update_weights_refuses_unfit(self, served: Served, tmp_path: Path) -> None:
        version = served.engine.get_version()
        tensors = weights_of(model_of(LLAMA, seed=5))
        unfit: list[tuple[dict[str, torch.Tensor], str]] = [
            (
                {name: each for name, each in tensors.items() if "k_proj" not in name},
                "3 missing: model.layers.0.self_attn.k_proj",
            ),
            ({**tensors, "model.norm.bias": torch.zeros(128)}, "1 unexpected: model.norm.bias"),
            (
                {**tensors, "lm_head.weight": torch.zeros(VOCAB + 1, 128)},
                r"1 of another shape: lm_head.weight \(129, 128\)",
            ),
        ]
        for weights, message in unfit:
            with pytest.raises(ValueError, match=message):
                await served.engine.update_weights(weights, version + 1)
        with pytest.raises(FileNotFoundError):
            await served.engine.update_weights(WeightsOnDisk(str(tmp_path)), version + 1)
        assert served.engine.get_version() == version
        await require_the_trainers(served, "after weights that did not fit")
