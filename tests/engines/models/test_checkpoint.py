"""Test checkpoints of several ranks: resharding, writes in the background, and failures."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helmsman.api.weights import DiskTarget, WeightFormat
from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines._server.weights import write_folder
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.ranks import exits_of_ranks, run_ranks
from tests.engines.small_models import GPT2, MIXTRAL, QWEN2, random_tokens

SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20, 7, 3)]
STEPS_BEFORE, STEPS_AFTER = 2, 3

pytestmark = pytest.mark.timeout(300)


def make(**fields: Any) -> FSDPTrainEngine:
    engine = FSDPTrainEngine(
        **{"model": QWEN2, "lr": 1e-2, "num_warmup_steps": 4, "rendezvous_timeout_s": 60, **fields}
    )
    engine.create_process_group()
    engine.initialize()
    return engine


def train(engine: FSDPTrainEngine, num_steps: int) -> list[dict[str, float]]:
    rank, size = engine.data_parallel_rank, engine.data_parallel_world_size
    return [engine.train_batch(SAMPLES[rank::size], "sft") for _ in range(num_steps)]


# --- resharding -----------------------------------------------------------------------------------


def save_and_go_on(folder: str) -> list[dict[str, float]]:
    engine = make()
    train(engine, STEPS_BEFORE)
    engine.set_version(17)
    engine.save(f"{folder}/now")
    engine.save_in_background(f"{folder}/later")
    steps = train(engine, STEPS_AFTER)  # while it is being written
    engine.wait_for_save()
    engine.destroy()
    return steps


def load_and_go_on(
    folder: str, choices: list[tuple[str, dict[str, Any]]]
) -> list[list[dict[str, float]]]:
    found = []
    # All engines share one process group.
    join_process_group(rendezvous_timeout_s=60, collective_timeout_s=60)
    for name, fields in choices:
        engine = make(seed=1, **fields)
        engine.load(f"{folder}/{name}")
        assert engine.get_version() == 17
        found.append(train(engine, STEPS_AFTER))
        engine.destroy()
    leave_process_group()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("four_ranks")
    return folder, run_ranks(save_and_go_on, 4, str(folder))[0]


CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("later", {}),
    ("now", {"offload": "all"}),
    ("now", {"tensor_parallel_size": 2}),
]


@pytest.mark.parametrize(
    ("num_ranks", "choices"), [(2, CHOICES), (1, CHOICES[:1])], ids=["two", "one"]
)
def test_load_on_fewer_ranks(
    saved: tuple[Path, list[dict[str, float]]],
    num_ranks: int,
    choices: list[tuple[str, dict[str, Any]]],
) -> None:
    folder, expected = saved
    for ways in run_ranks(load_and_go_on, num_ranks, str(folder), choices):
        assert len(ways) == len(choices)
        for steps in ways:
            for step, unbroken in zip(steps, expected, strict=True):
                # other meshes sum in another order
                assert step == pytest.approx(unbroken, abs=1e-5, rel=1e-4)


def test_save_part_of_each_rank(saved: tuple[Path, list[dict[str, float]]]) -> None:
    folder, _ = saved
    assert sorted(path.name for path in folder.iterdir()) == ["later", "now"]
    sizes = [path.stat().st_size for path in sorted((folder / "now" / "state").glob("*.distcp"))]
    assert len(sizes) == 4
    assert max(sizes) < 2 * min(sizes)


# --- faults ---------------------------------------------------------------------------------------


def fail_in_the_background(folder: str) -> dict[str, Any]:
    engine = make()
    train(engine, 1)
    engine.save(f"{folder}/good")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # From now on, rank 1 cannot write larger files; the ignored signal would end it.
    if engine.data_parallel_rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    found: dict[str, Any] = {"errors": []}
    engine.save_in_background(f"{folder}/bad")
    for attempt in (
        engine.wait_for_save,
        engine.wait_for_save,
        lambda: engine.save(f"{folder}/bad"),
    ):
        try:
            attempt()
        except (OSError, RuntimeError) as error:
            found["errors"].append((type(error), str(error)))
        else:
            found["errors"].append(None)
    engine.save_in_background(f"{folder}/bad")
    writing = engine._checkpointer._writing
    assert writing is not None
    writing.join()
    try:
        train(engine, 1)
    except (OSError, RuntimeError) as error:
        found["train"] = str(error)
    found["version"] = engine.get_version()
    train(engine, 1)
    engine.load(f"{folder}/good")
    found["loaded"] = engine.get_version()
    engine.destroy()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    return found


def test_save_in_background_fails(tmp_path: Path) -> None:
    first, second = run_ranks(fail_in_the_background, 2, str(tmp_path))
    waited, waited_again, saved = first["errors"]
    assert "writing to" in waited[1]
    assert "failed on rank 1" in waited[1]
    assert "on another rank" in second["errors"][0][1]
    assert waited_again is None
    assert "failed on rank 1" in saved[1]
    assert "failed on rank 1" in first["train"]
    assert "on another rank" in second["train"]
    assert first["version"] == 1, "no step was taken"
    assert first["loaded"] == second["loaded"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def write_too_much(folder: str) -> tuple[list[tuple[type, str]], list[str]]:
    engine = make()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    found: list[tuple[type, str]] = []
    attempts: tuple[Callable[[], object], ...] = (
        lambda: engine.save(f"{folder}/checkpoint"),
        lambda: engine.export_hf(f"{folder}/model"),
        lambda: engine.publish_weights(
            DiskTarget(version=0, folder=f"{folder}/weights", num_kept=1), WeightFormat()
        ),
        lambda: write_folder([{"weight": torch.zeros(10_000)}], folder),
    )
    for attempt in attempts:
        try:
            attempt()
        except OSError as error:
            found.append((type(error), str(error)))
    left = sorted(os.listdir(folder)) + os.listdir(f"{folder}/weights")
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    engine.destroy()
    return found, left


def test_write_errors_are_os_errors(tmp_path: Path) -> None:
    """A full disk raises an OSError, although torch and safetensors have errors of their own."""
    ((found, left),) = run_ranks(write_too_much, 1, str(tmp_path))
    assert [kind for kind, _ in found] == [OSError] * 4
    assert all(os.strerror(errno.EFBIG) in text and str(tmp_path) in text for _, text in found)
    assert "set ServerConfig.exchange_folder to a folder with room" in found[3][1]
    assert left == ["weights"]


def die_in_a_save(folder: str) -> None:
    engine = make()
    train(engine, STEPS_BEFORE)
    engine.save(f"{folder}/checkpoint")
    if engine.data_parallel_rank == 1:
        # A larger file ends the process, as a kill during the write would.
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    engine.save_in_background(f"{folder}/checkpoint")
    try:
        engine.wait_for_save()
    except (OSError, RuntimeError):
        os._exit(3)
    os._exit(0)


def test_save_in_background_rank_dies(tmp_path: Path) -> None:
    codes, outputs, _ = exits_of_ranks(die_in_a_save, 2, str(tmp_path))
    assert codes == [3, -signal.SIGXFSZ], outputs
    found = run_ranks(go_on_alone, 1, str(tmp_path / "checkpoint"))[0]
    assert found == STEPS_BEFORE
    assert (tmp_path / "checkpoint").is_dir()


def go_on_alone(path: str) -> int:
    engine = make()
    engine.load(path)
    train(engine, 1)
    version = engine.get_version() - 1
    engine.destroy()
    return version


# --- random numbers -------------------------------------------------------------------------------


def drop_and_go_on(folder: str) -> tuple[Any, Any]:
    engine = make(model={**GPT2, "resid_pdrop": 0.3})
    train(engine, 2)
    engine.save(f"{folder}/checkpoint")
    expected = train(engine, 2)
    engine.load(f"{folder}/checkpoint")
    again = train(engine, 2)
    engine.destroy()
    return expected, again


def test_load_restores_random_state(tmp_path: Path) -> None:
    for expected, again in run_ranks(drop_and_go_on, 2, str(tmp_path)):
        assert again == expected


# --- export ---------------------------------------------------------------------------------------


def export(folder: str, model: Any) -> dict[str, Any]:
    engine = make(model=model)
    train(engine, 1)
    engine.export_hf(f"{folder}/whole")
    engine.sleep()
    engine.export_hf(f"{folder}/sharded", "bfloat16", 20_000)
    weights = engine.export_weights()
    engine.wake()
    errors = []
    attempts: tuple[Callable[[], object], ...] = (
        lambda: engine.export_hf("/proc/nowhere/model"),
        lambda: engine.save("/proc/nowhere/checkpoint"),
        lambda: engine.export_hf(folder, "int3"),
        lambda: engine.load(f"{folder}/nowhere"),
    )
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, OSError, RuntimeError) as error:
            errors.append(type(error).__name__)
    train(engine, 1)
    engine.destroy()
    return {"weights": weights, "errors": errors}


def saved_in(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("model", [QWEN2, MIXTRAL], ids=lambda each: each["model_type"])
def test_export_hf_read_by_transformers(tmp_path: Path, model: dict[str, Any]) -> None:
    first, second = run_ranks(export, 2, str(tmp_path), model)
    assert first["errors"][2:] == ["ValueError"] * 2
    # only rank 0 examines the path
    assert second["errors"] == ["RuntimeError"] * 2 + ["ValueError"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sharded", "whole"]
    whole, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert whole.dtype == torch.float32
    saved = saved_in(tmp_path / "whole")
    assert saved.keys() == first["weights"].keys()
    for name, tensor in first["weights"].items():
        assert torch.equal(saved[name], tensor), name
    sharded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "sharded", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sharded.dtype == torch.bfloat16
    saved = saved_in(tmp_path / "sharded")
    for name, tensor in first["weights"].items():
        assert torch.equal(saved[name], tensor.bfloat16()), name
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    if model is QWEN2:
        assert all(path.stat().st_size < 20_000 + 2048 for path in files)
