"""Test that moments of AdamW in bfloat16 take half of the memory, and that steps resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helmsman.engines._train.optimizer import FusedAdamW
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.conftest import Make
from tests.engines.small_models import random_tokens

SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def moments_of(engine: FSDPTrainEngine) -> list[torch.Tensor]:
    states = engine._built_optimizer().state.values()
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


def num_bytes(engine: FSDPTrainEngine) -> int:
    return sum(each.nbytes for each in moments_of(engine))


def test_step_rounds_only_the_moments() -> None:
    """A step equals torch's, from moments that were rounded after the step before."""
    shapes = [(3, 4), (7,), (2, 2)]
    torch.manual_seed(0)
    rounded = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    plain = [torch.nn.Parameter(each.detach().clone()) for each in rounded]
    optimizer = FusedAdamW(rounded, moments_dtype=torch.bfloat16, **OPTIONS)
    reference = torch.optim.AdamW(plain, **OPTIONS)  # type: ignore[arg-type]
    for _ in range(4):
        for mine, theirs in zip(rounded, plain, strict=True):
            mine.grad = torch.randn(mine.shape)
            theirs.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
        for mine, theirs in zip(rounded, plain, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
            for key in ("exp_avg", "exp_avg_sq"):
                kept = reference.state[theirs][key] = (
                    reference.state[theirs][key].bfloat16().float()
                )
                assert optimizer.state[mine][key].dtype == torch.bfloat16
                torch.testing.assert_close(
                    optimizer.state[mine][key].float(), kept, atol=1e-6, rtol=2**-8
                )


def test_train_batch_bfloat16_moments_memory(make: Make) -> None:
    exact, half = make(), make(moments_dtype="bfloat16")
    for _ in range(20):
        expected, found = exact.train_batch(SAMPLES, "sft"), half.train_batch(SAMPLES, "sft")
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.02, abs=0.02)
    num_parameters = sum(each.numel() for each in half._built_model().parameters())
    assert num_bytes(exact) == 8 * num_parameters
    assert num_bytes(half) == 4 * num_parameters


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_load_bfloat16_moments_continues_exactly(make: Make, tmp_path: Path, offload: str) -> None:
    engine = make(moments_dtype="bfloat16", offload=offload)
    engine.train_batch(SAMPLES, "sft")
    engine.save(str(tmp_path / "saved"))
    expected = []
    for _ in range(2):
        engine.sleep()
        engine.wake()
        expected.append(engine.train_batch(SAMPLES, "sft"))
    other = make(moments_dtype="bfloat16", offload=offload)
    other.load(str(tmp_path / "saved"))
    assert [other.train_batch(SAMPLES, "sft") for _ in range(2)] == expected
    assert {each.dtype for each in moments_of(other)} == {torch.bfloat16}


@pytest.mark.parametrize(("saved", "own"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_load_moments_of_another_type(make: Make, tmp_path: Path, saved: str, own: str) -> None:
    engine = make(moments_dtype=saved)
    engine.train_batch(SAMPLES, "sft")
    engine.save(str(tmp_path / "saved"))
    expected = engine.train_batch(SAMPLES, "sft")
    other = make(moments_dtype=own)
    other.load(str(tmp_path / "saved"))
    assert {each.dtype for each in moments_of(other)} == {getattr(torch, own)}
    assert other.train_batch(SAMPLES, "sft") == pytest.approx(expected, rel=1e-2)
