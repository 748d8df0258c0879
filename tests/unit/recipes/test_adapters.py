"""Test what recipes choose for a trainer of adapters."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helmsman.api.corrections import Correction
from helmsman.engines.train_config import LoRA
from helmsman.recipes import SFT
from helmsman.recipes.config import resolve
from helmsman.recipes.roles import engine_arguments, make_jobs, sends_adapters
from helmsman.recipes.settings import (
    Algorithm,
    Data,
    GRPOSettings,
    Machines,
    Reward,
    Rollout,
    Sync,
    Train,
)

REWARD = Reward(use="exact")


def settings_of(engine: str = "vllm", way: Any = "auto", **lora: Any) -> GRPOSettings:
    return GRPOSettings(
        model="model",
        data=Data(train="rows.jsonl"),
        train=Train(engine={"lora": lora}),
        rollout=Rollout(engine=engine, staleness=1.5),
        sync=Sync(lora=way),
        algorithm=Algorithm(kl_coef=0.1),
        rewards=(REWARD,),
    )


@pytest.mark.parametrize(
    ("engine", "way", "sends"),
    [
        ("vllm", "auto", True),
        ("hf", "auto", True),
        ("server", "auto", True),
        ("my.Engine", "auto", False),
        ("server", "adapter", True),
        ("vllm", "merged", False),
    ],
)
def test_sends_adapters_where_the_engine_takes_them(engine: str, way: str, sends: bool) -> None:
    assert sends_adapters(settings_of(engine, way, rank=4)) is sends


@pytest.mark.parametrize(("engine", "sends"), [("vllm", False), ("server", False), ("hf", True)])
def test_sends_adapters_of_experts_to_hf_alone(engine: str, sends: bool, tmp_path: Path) -> None:
    named = ["q_proj", "experts.down_proj"]
    assert sends_adapters(settings_of(engine, rank=4, targets=named)) is sends
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "target_parameters": ["a.b"]}')
    assert sends_adapters(settings_of(engine, path=str(tmp_path))) is sends
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "target_parameters": null}')
    assert sends_adapters(settings_of(engine, path=str(tmp_path)))


@pytest.mark.parametrize(
    ("engine", "targets", "is_refused"),
    [
        ("vllm", ["q_proj", "experts.down_proj"], True),
        ("server", ["model.layers.0.mlp.experts.gate_up_proj"], True),
        ("vllm", r"^(?!.*experts).*_proj$", False),
        ("vllm", ["experts.0.w1"], False),
        ("vllm", ["q_proj", "shared_experts.down_proj"], False),
        ("hf", ["experts.down_proj"], False),
        ("my.Engine", ["experts.down_proj"], False),
    ],
)
def test_adapters_of_experts_refused_before_a_worker(
    engine: str, targets: Any, is_refused: bool
) -> None:
    settings = msgspec.structs.replace(
        settings_of(engine, "adapter", targets=targets), rollout=Rollout(engine=engine)
    )
    said = (
        f"sync.lora is 'adapter', and rollout.engine '{engine}' takes no adapters of experts that "
        "are one tensor; expected 'merged' or 'auto'"
    )
    with pytest.raises(ValueError, match=said) if is_refused else contextlib.nullcontext():
        resolve(settings)


def test_adapters_of_instances_on_several_nodes_refused() -> None:
    settings = msgspec.structs.replace(
        settings_of("vllm", "adapter"),
        cluster=Machines(
            scheduler="ray", devices_per_node=2, num_nodes=3, rollout_devices=4, train_workers=2
        ),
        sync=Sync(lora="adapter", way="collective"),
    )
    with pytest.raises(ValueError, match="and an instance spans nodes; expected"):
        resolve(settings)


def test_adapters_that_are_not_trained_refused() -> None:
    settings = msgspec.structs.replace(settings_of(way="adapter"), train=Train())
    with pytest.raises(ValueError, match="sync.lora is 'adapter', and train.engine.lora is not gi"):
        resolve(settings)


@pytest.mark.parametrize("content", [None, "[]", "{", '{"peft_type": "IA3"}', '{"r": null}'])
def test_folder_without_an_adapter_refused(content: str | None, tmp_path: Path) -> None:
    """A name on the Hub, such as 'me/my-lora', is no folder."""
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    recipe = SFT("m", ["text"], train={"engine": {"lora": {"path": str(tmp_path)}}})
    with pytest.raises(
        ValueError,
        match=rf"train.engine.lora.path is {tmp_path}, whose adapter_config.json cannot be used: ",
    ):
        recipe.load()


@pytest.mark.parametrize("engine", ["vllm", "server"])
def test_engine_gets_rank_and_number(engine: str, tmp_path: Path) -> None:
    arguments = engine_arguments(settings_of(engine, rank=20))
    assert (arguments["max_lora_rank"], arguments["max_loras"]) == (32, 4)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    assert engine_arguments(settings_of(path=str(tmp_path)))["max_lora_rank"] == 8
    assert engine_arguments(settings_of())["max_lora_rank"] == 16
    assert "max_lora_rank" not in engine_arguments(settings_of(way="merged", rank=8))


def test_no_second_model_for_a_reference() -> None:
    assert [job.role for job in make_jobs(settings_of(rank=4))] == ["train", "rollout"]


def test_reference_of_a_given_adapter_refused() -> None:
    """Its base model is not the policy that the run starts from."""
    with pytest.raises(ValueError, match="the reference of adapters is the base model"):
        resolve(settings_of(path="adapter"))


@pytest.mark.parametrize("correction", [Correction(mode="mask"), Correction(outlier=9.0)])
def test_correction_with_a_loss_that_ignores_it_refused(correction: Correction) -> None:
    algorithm = Algorithm(loss="decoupled_ppo")
    settings = msgspec.structs.replace(
        settings_of(rank=4), algorithm=algorithm, correction=correction
    )
    with pytest.raises(ValueError, match="algorithm.loss is 'decoupled_ppo'; .* the correction"):
        resolve(settings)


def test_targets_that_are_no_expression_refused() -> None:
    message = r"`?train.engine.lora.*targets is '\.\*\(q_proj' \(missing \), unterminated"
    with pytest.raises(ValueError, match=message):
        SFT("m", ["text"], train={"engine": {"lora": {"targets": ".*(q_proj"}}})


def test_fields_beside_a_folder_refused() -> None:
    with pytest.raises(ValueError, match="path and rank, targets are both given"):
        LoRA(path="adapter", rank=4, targets=("q_proj",))
