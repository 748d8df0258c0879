"""Tests of interrupted requests and of samples with real engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._rollout.request_api import samples_of
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._rollout.routing import RoundRobin
from helmsman.engines._models.model import build_model
from tests.contract.helpers import wait_until
from tests.engines.small_models import QWEN2, random_tokens

NUM_TOKENS = 400
PROMPTS = [random_tokens(length, seed=length) for length in (3, 9, 5)]
SAMPLING = [
    SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0),
    SamplingParams(max_new_tokens=NUM_TOKENS, seed=2**40 + 5),
    SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, seed=6),
]


@pytest.fixture(scope="module")
def scheduler(engines_scheduler: Scheduler) -> Iterator[Scheduler]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        patch.setenv("HELMSMAN_PLATFORM", "cpu")
        yield engines_scheduler


@pytest.fixture(scope="module")
def rollout(scheduler: Scheduler) -> Iterator[RolloutController]:
    """Rollout that sends all samples of a prompt to one instance."""
    engine = {"model": QWEN2, "max_model_len": 1024, "max_concurrency": 8}
    with RolloutController(
        scheduler,
        "helmsman.engines.rollout.HFRolloutEngine",
        Job(role="rollout", replicas=2),
        engine_kwargs=engine,
        policy=RoundRobin(),
        samples_by_engine=True,
    ) as rollout:
        yield rollout


def _stat(scheduler: Scheduler, name: str) -> int:
    return sum(scheduler.call_engine(f"rollout/{index}", "stats")[name] for index in range(2))


def test_pause_and_resume_keep_the_tokens(scheduler: Scheduler, rollout: RolloutController) -> None:
    whole = rollout.generate(PROMPTS, SAMPLING)
    # the same weights, under other versions
    weights = build_model(QWEN2, seed=0, dtype=torch.float32).state_dict()
    futures = [rollout.submit(prompt, each) for prompt, each in zip(PROMPTS, SAMPLING, strict=True)]
    for version in (1, 2):
        before = _stat(scheduler, "num_generated_tokens")
        wait_until(
            lambda before=before: _stat(scheduler, "num_generated_tokens") > before + 60,  # type: ignore[misc]
            "the requests have tokens",
        )
        rollout.pause("abort", 30)
        assert rollout.stats().num_queued == len(PROMPTS), "no request has ended"
        assert _stat(scheduler, "num_running") == 0
        rollout.update_weights(weights, version)
        rollout.resume()
    for expected, future in zip(whole, futures, strict=True):
        result = future.result(60)
        assert result.token_ids == expected.token_ids
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert result.versions == sorted(result.versions)
        assert set(result.versions) == {0, 1, 2}
        assert result.stop_reason == expected.stop_reason


def test_samples_by_engine_compute_the_prompt_once(
    scheduler: Scheduler, rollout: RolloutController
) -> None:
    """The samples equal those of separate requests."""
    prompt, sampling = random_tokens(101, seed=1), SamplingParams(max_new_tokens=20, seed=7)
    request = GenerationRequest(request_id="apart", prompt_ids=prompt, sampling=sampling)
    separate = rollout.generate(samples_of(request, 8))
    before = _stat(scheduler, "num_prompt_tokens")
    drawn = rollout.generate([prompt], sampling, num_samples=8)
    assert _stat(scheduler, "num_prompt_tokens") == before + 100, (
        "the first step has the last token"
    )
    assert [result.token_ids for result in drawn] == [result.token_ids for result in separate]
    assert len({tuple(result.token_ids) for result in drawn}) == 8
