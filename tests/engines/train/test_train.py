"""Tests of the train engine on one rank in this process."""

from __future__ import annotations

import gc
import json
import math
import pickle
import shutil
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from helmsman.engines.train import FSDPTrainEngine, TrainConfig  # type: ignore[attr-defined]
from tests.engines.conftest import Make
from tests.engines.ranks import free_port
from tests.engines.small_models import GPT2, LLAMA, QWEN2, random_tokens
from tests.engines.train.communication import Collectives, failing_backward
from tests.engines.train.layouts import mean_loss

SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20)]
LR = 1e-2


def test_train_batch_lowers_loss_counts_versions(make: Make) -> None:
    engine = make()
    before = engine.eval_batch(SAMPLES, "sft")
    steps = [engine.train_batch(SAMPLES, "sft") for _ in range(5)]
    after = engine.eval_batch(SAMPLES, "sft")
    assert steps[0]["loss"] == pytest.approx(before["loss"], rel=1e-6)
    assert after["loss"] < before["loss"] - 0.5
    assert steps[0]["num_tokens"] == sum(len(sample["input_ids"]) - 1 for sample in SAMPLES)
    assert steps[0]["lr"] == LR
    assert engine.get_version() == 5
    engine.set_version(11)
    assert engine.get_version() == 11
    with pytest.raises(
        RuntimeError, match=r"initialize\(\) was called on a train engine that has a model"
    ):
        engine.initialize()


def test_train_batch_equals_plain_torch(make: Make) -> None:
    engine = make(model=LLAMA, max_tokens_per_micro_batch=20, max_grad_norm=0.5, weight_decay=0.1)
    weights = engine.export_weights()
    assert weights is not None
    reference = AutoModelForCausalLM.from_config(
        engine._built_model().config, attn_implementation="sdpa"
    )
    reference.load_state_dict(weights)
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1
    )
    for _ in range(3):
        loss = mean_loss(reference, SAMPLES)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        stats = engine.train_batch(SAMPLES, "sft")
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("model", [QWEN2, GPT2], ids=lambda config: config["model_type"])
def test_forward_logprobs_in_order(make: Make, model: dict[str, Any]) -> None:
    engine = make(model=model, max_tokens_per_micro_batch=24)
    weights = engine.export_weights()
    assert weights is not None
    reference = AutoModelForCausalLM.from_config(
        engine._built_model().config, attn_implementation="sdpa"
    ).eval()
    reference.load_state_dict(weights, strict=False)
    for sample, logprobs in zip(SAMPLES, engine.forward(SAMPLES), strict=True):
        tokens = torch.tensor(sample["input_ids"])
        expected = (
            reference(input_ids=tokens[None])
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(-1, tokens[1:, None])[:, 0]
        )
        assert logprobs[0] == 0
        torch.testing.assert_close(logprobs[1:], expected.detach(), atol=1e-4, rtol=1e-5)


def test_train_batch_bfloat16(make: Make) -> None:
    model = {**QWEN2, "initializer_range": 0.1}
    exact, rounded = make(model=model), make(model=model, compute_dtype="bfloat16")
    for _ in range(3):
        loss = exact.train_batch(SAMPLES, "sft")["loss"]
        assert rounded.train_batch(SAMPLES, "sft")["loss"] == pytest.approx(loss, rel=0.02)
    weights = rounded.export_weights()
    assert weights is not None
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    with pytest.raises(ValueError, match="no floating-point type 'int8'"):
        make(compute_dtype="int8")


def test_train_batch_one_rank_plain(make: Make) -> None:
    """A single rank computes in bfloat16 as FSDP would, without its hooks and collectives."""
    engine = make(
        model={**QWEN2, "initializer_range": 0.1},
        compute_dtype="bfloat16",
        gradient_checkpointing=True,
        max_tokens_per_micro_batch=24,
    )
    model = engine._built_model()
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    kinds = []
    model.get_submodule("model.norm").register_forward_hook(
        lambda module, inputs, output: kinds.append((module.weight.dtype, output.dtype))  # type: ignore[func-returns-value]
    )
    with Collectives() as counted:
        engine._accumulate(SAMPLES, "sft", None)
    assert not counted.counts
    assert kinds == [(torch.bfloat16, torch.bfloat16)] * 3  # one for each micro-batch
    for parameter in model.parameters():
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.dtype == parameter.grad.dtype == torch.float32  # type: ignore[union-attr]
    with pytest.raises(ArithmeticError, match="in a pass"), failing_backward(engine):
        engine.train_batch(SAMPLES, "sft")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert engine.train_batch(SAMPLES, "sft")["grad_norm"] > 0


def test_train_batch_warms_up_lr(make: Make) -> None:
    engine = make(num_warmup_steps=4)
    rates = [engine.train_batch(SAMPLES, "sft")["lr"] for _ in range(6)]
    assert rates == pytest.approx([LR * share for share in (0.25, 0.5, 0.75, 1, 1, 1)])


def test_set_lr_from_next_step(make: Make) -> None:
    engine = make()
    engine.set_lr(LR / 4)
    assert engine.train_batch(SAMPLES, "sft")["lr"] == LR / 4
    with pytest.raises(ValueError, match=r"lr is -1.0; expected 0 or more"):
        engine.set_lr(-1.0)
    with pytest.raises(ValueError, match=r"lr is inf; expected 0 or more, and finite"):
        engine.set_lr(math.inf)


@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_load_continues_exactly(make: Make, tmp_path: Path, num_steps_before: int) -> None:
    engine, fresh = make(num_warmup_steps=3), make(seed=1, num_warmup_steps=3)
    for _ in range(num_steps_before):
        engine.train_batch(SAMPLES, "sft")
    path = str(tmp_path / "deep" / "checkpoint")
    engine.set_version(7)
    engine.save(path)
    expected = [engine.train_batch(SAMPLES, "sft") for _ in range(2)]
    for loaded in (fresh, engine):
        loaded.load(path)
        assert loaded.get_version() == 7
        assert [loaded.train_batch(SAMPLES, "sft") for _ in range(2)] == expected


def test_load_without_random_state(make: Make, tmp_path: Path) -> None:
    """Checkpoints of ranks on another kind of device lack the random state of this kind."""
    engine = make()
    engine.train_batch(SAMPLES, "sft")
    engine.save(str(tmp_path / "checkpoint"))
    expected = engine.train_batch(SAMPLES, "sft")
    file = tmp_path / "checkpoint" / "state" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    del metadata.state_dict_metadata["random.0.host"]
    file.write_bytes(pickle.dumps(metadata))
    engine.load(str(tmp_path / "checkpoint"))
    assert engine.train_batch(SAMPLES, "sft") == expected


def test_initialize_from_checkpoint(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.train_batch(SAMPLES, "sft")
    path = str(tmp_path / "checkpoint")
    engine.save(path)
    (tmp_path / "checkpoint" / "tokenizer.json").write_text("{}")
    again = make(model=path)
    again.save(str(tmp_path / "again"))
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"
    assert again.eval_batch(SAMPLES, "sft") == engine.eval_batch(SAMPLES, "sft")
    assert again.get_version() == 0


def test_save_replaces_checkpoint(make: Make, tmp_path: Path) -> None:
    engine, path = make(), tmp_path / "checkpoint"
    engine.save(str(path))
    engine.train_batch(SAMPLES, "sft")
    engine.save(str(path))
    assert json.loads((path / "helmsman.json").read_text()) == {
        "progress": {"version": 1, "num_steps": 1},
        "num_ranks": 1,
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_save_failure_keeps_other_files(make: Make, tmp_path: Path) -> None:
    engine = make()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match="file"):
        engine.save(str(tmp_path / "file" / "checkpoint"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_save_refuses_other_folders(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong path, such as a parent folder or an empty path, would delete other files."""
    engine = make()
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "file").write_text("of somebody")
    monkeypatch.chdir(tmp_path / "runs")
    for write in (engine.save, engine.export_hf):
        for path in ("", ".", str(tmp_path), str(tmp_path / "runs")):
            with pytest.raises(
                FileExistsError,
                match="is a folder with other files and no .*, and would be replaced",
            ):
                write(path)
        with pytest.raises(FileExistsError, match="file is no folder"):
            write(str(tmp_path / "file"))
        write(str(tmp_path / "runs" / "first"))  # an empty folder
        write(str(tmp_path / "runs" / "first"))
        shutil.rmtree(tmp_path / "runs" / "first")
        (tmp_path / "runs" / "first").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "runs"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]


def test_load_invalid_checkpoints(make: Make, tmp_path: Path) -> None:
    engine, other = make(), make(model={**QWEN2, "hidden_size": 16})
    other.save(str(tmp_path / "other"))
    undisturbed = make()
    assert engine.train_batch(SAMPLES, "sft") == undisturbed.train_batch(SAMPLES, "sft")
    with pytest.raises(ValueError, match="holds another model"):
        engine.load(str(tmp_path / "other"))
    with pytest.raises(ValueError, match="not a checkpoint"):
        engine.load(str(tmp_path))
    engine.save(str(tmp_path / "own"))
    for file in (tmp_path / "own" / "helmsman.json", tmp_path / "own" / "state" / ".metadata"):
        content = file.read_bytes()
        for left in (
            b"",
            content[: len(content) // 2],
        ):
            # as after a crash of the host during the write
            file.write_bytes(left)
            with pytest.raises(
                ValueError, match=f"'{file}' is damaged, possibly by a crash of its host"
            ):
                engine.load(str(tmp_path / "own"))
        file.write_bytes(content)
    part = tmp_path / "own" / "state" / "__0_0.distcp"
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(
        ValueError,
        match=rf"is an incomplete checkpoint: .* has {len(content) - 1} of {len(content)} bytes",
    ):
        engine.load(str(tmp_path / "own"))
    with pytest.raises(ValueError, match=r"is an incomplete checkpoint: .* has \d+ of \d+ bytes"):
        make(model=str(tmp_path / "own"))
    part.unlink()
    with pytest.raises(
        ValueError, match=r"is an incomplete checkpoint: it has no state/__0_0.distcp"
    ):
        engine.load(str(tmp_path / "own"))
    shutil.rmtree(part.parent)
    with pytest.raises(ValueError, match="it has no state/.metadata"):
        engine.load(str(tmp_path / "own"))
    assert [engine.train_batch(SAMPLES, "sft") for _ in range(2)] == [
        undisturbed.train_batch(SAMPLES, "sft") for _ in range(2)
    ]


def infinite_loss(
    logprobs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return logprobs.sum() * math.inf, {}


def test_train_batch_infinite_gradient(make: Make) -> None:
    engine = make()
    loss = engine.eval_batch(SAMPLES, "sft")
    with pytest.raises(FloatingPointError, match="no step was taken"):
        engine.train_batch(SAMPLES, infinite_loss)
    assert engine.eval_batch(SAMPLES, "sft") == loss
    assert engine.get_version() == 0


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_train_batch_error_inside_pass(make: Make, place: str) -> None:
    """An error in a pass, such as out of memory, leaves the engine usable."""
    engine, undisturbed = make(), make()
    engine.train_batch(SAMPLES, "sft")
    undisturbed.train_batch(SAMPLES, "sft")

    def fail(*_: Any) -> None:
        raise ArithmeticError(f"in the {place} pass")

    def hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
        fail() if place == "forward" else output.register_hook(fail)

    model: Any = engine._built_model()
    handle = model.model.layers[0].register_forward_hook(hook)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match=f"in the {place} pass"):
            engine.train_batch(SAMPLES, "sft")
    handle.remove()
    assert engine.eval_batch(SAMPLES, "sft") == undisturbed.eval_batch(SAMPLES, "sft")
    for _ in range(2):
        assert engine.train_batch(SAMPLES, "sft") == undisturbed.train_batch(SAMPLES, "sft")


def without_gradient(
    logprobs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.tensor(logprobs.sum().item()), {}


def with_a_number(
    logprobs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    return logprobs.sum(), {"share": 0.5}


def per_row(
    logprobs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return logprobs.sum(-1), {}


def alone(logprobs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return logprobs.sum()


def constant_where_nothing_counts(
    logprobs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (-logprobs * batch["loss_mask"]).sum() if batch["loss_mask"].any() else torch.zeros(
        ()
    ), {}


def test_train_batch_invalid_losses(make: Make) -> None:
    engine, undisturbed = make(), make()
    for loss, message in (
        (without_gradient, "'without_gradient' returned a sum that has no gradient"),
        (
            with_a_number,
            "'with_a_number' returned share as a float; expected a tensor of one number",
        ),
        (per_row, r"'per_row' returned loss_sum as \(4,\)"),
        (alone, "'alone' returned a Tensor; expected"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.train_batch(SAMPLES, loss)  # type: ignore[arg-type]
    assert engine.train_batch(SAMPLES, "sft") == undisturbed.train_batch(SAMPLES, "sft")


def test_train_batch_micro_batch_without_tokens(make: Make) -> None:
    engine, other = make(max_tokens_per_micro_batch=1), make()
    batch = [*SAMPLES, {"input_ids": [1, 2, 3], "loss_mask": [False] * 3}]
    batch = [{"loss_mask": [True] * len(sample["input_ids"]), **sample} for sample in batch]  # type: ignore[dict-item, index]
    expected = other.train_batch(batch, "sft")  # type: ignore[arg-type]
    assert engine.train_batch(batch, constant_where_nothing_counts) == pytest.approx(  # type: ignore[arg-type]
        expected, rel=1e-5
    )


def test_train_batch_without_tokens(make: Make) -> None:
    engine = make()
    for samples in ([], [{"input_ids": [1]}], [{"input_ids": [1, 2], "loss_mask": [1, 0]}]):
        with pytest.raises(ValueError, match="no token of the global batch counts"):
            engine.train_batch(samples, "sft")
    assert engine.forward([]) == []


def test_process_group_ends_with_last_engine(make: Make) -> None:
    first, second = make(), make()
    first.destroy()
    first.destroy()
    assert second.data_parallel_world_size == 1
    second.train_batch(SAMPLES, "sft")
    with pytest.raises(RuntimeError, match="initialize"):
        first.train_batch(SAMPLES, "sft")


def test_initialize_again_resets_steps(make: Make) -> None:
    engine = make(num_warmup_steps=4)
    expected = [engine.train_batch(SAMPLES, "sft") for _ in range(2)]
    engine.destroy()
    engine.initialize()
    assert engine.get_version() == 0
    assert [engine.train_batch(SAMPLES, "sft") for _ in range(2)] == expected


def test_dropped_engine_is_freed(make: Make) -> None:
    make()  # keeps the process group
    engine = FSDPTrainEngine(model=QWEN2, lr=LR)
    engine.initialize()
    engine.train_batch(SAMPLES, "sft")
    engine.forward(SAMPLES)
    dropped = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert dropped() is None
    finally:
        gc.enable()


def test_destroy_keeps_foreign_process_group(make: Make) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make().destroy()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_create_process_group_ranks_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    engine = FSDPTrainEngine(model=QWEN2, rendezvous_timeout_s=1)
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT"):
        engine.create_process_group()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for rank, hint in (("0", "is the port in use"), ("1", "is rank 0 running")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(
            ConnectionError,
            match=f"rank {rank} of 2 did not connect to the other ranks .* within 1 s; {hint}",
        ):
            engine.create_process_group()
    engine.destroy()


def test_train_config_invalid_fields() -> None:
    config = TrainConfig(model=QWEN2)
    assert FSDPTrainEngine(config).config is config
    assert FSDPTrainEngine(model=QWEN2, betas=[0.9, 0.99]).config.betas == (0.9, 0.99)
    with pytest.raises(msgspec.ValidationError, match="learning_rate"):
        FSDPTrainEngine(model=QWEN2, learning_rate=1e-3)
    with pytest.raises(msgspec.ValidationError, match="lr"):
        FSDPTrainEngine(model=QWEN2, lr="fast")
    for fields, message in (
        ({"lr": -1e-3}, "lr is -0.001; expected 0 or more"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\); expected two numbers from 0 to below 1"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
        ({"num_warmup_steps": -1}, "num_warmup_steps is -1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; expected a number above 0, or None"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch is 0; expected 1 or more"),
        ({"num_prefetched_layers": -1}, "num_prefetched_layers is -1; expected 0 or more"),
        ({"reduce_dtype": "auto"}, "reduce_dtype is 'auto'; expected 'float32' or 'bfloat16'"),
        ({"moments_dtype": "float16"}, "moments_dtype is 'float16'; expected 'float32' or"),
        ({"rendezvous_timeout_s": 0.0}, "rendezvous_timeout_s is 0.0; expected seconds above 0"),
        ({"collective_timeout_s": math.inf}, "collective_timeout_s is inf"),
    ):
        with pytest.raises(ValueError, match=message):
            FSDPTrainEngine(model=QWEN2, **fields)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            TrainConfig(model=QWEN2, **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        FSDPTrainEngine(config, lr=1.0)
    with pytest.raises(RuntimeError, match="initialize"):
        FSDPTrainEngine(config).export_weights()
