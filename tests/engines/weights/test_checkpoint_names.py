"""Test that a trainer exports weights with the names and shapes of Hugging Face files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from helmsman.api.weights import MemoryTarget, WeightFormat, WeightsInMemory
from helmsman.engines._models.distributed import named_tensors
from helmsman.engines._weights.checkpoint_names import CheckpointNames, Conversion
from helmsman.engines._weights.fit import expected_of, require_fit
from helmsman.engines.weight_transfer import Incoming
from helmsman.engines.weights import apply_weights
from tests.engines.conftest import Make
from tests.engines.small_models import DEEPSEEK_V3, LLAMA, MIXTRAL, QWEN2, QWEN3_MOE

FAMILIES = {each["model_type"]: each for each in (LLAMA, QWEN2, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3)}
families = pytest.mark.parametrize("config", FAMILIES.values(), ids=list(FAMILIES))
EXPERT = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w1.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.3.gate_proj.weight",
}


def model_of(config: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()


def converted(model: nn.Module) -> dict[str, torch.Tensor]:
    conversion = Conversion(CheckpointNames(model))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model).items():
        found.update(conversion(name, tensor.detach()))
    return found


def arriving(tensors: dict[str, torch.Tensor]) -> Incoming:
    return Incoming({name: tuple(each.shape) for name, each in tensors.items()}, iter([tensors]))


@families
def test_conversion_matches_saved_files(config: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(config)
    model.save_pretrained(tmp_path)
    saved, found = load_file(tmp_path / "model.safetensors"), converted(model)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert CheckpointNames(model).shapes == {n: list(each.shape) for n, each in saved.items()}
    assert EXPERT.get(config["model_type"], "lm_head.weight") in {*saved, "lm_head.weight"}


def test_conversion_joins_tensors() -> None:
    """Tensors that files join are converted once their group is complete."""
    config = AutoConfig.for_model("hrm_text")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = CheckpointNames(model)
    assert len(names.shapes) < len(named_tensors(model))
    assert {n: list(each.shape) for n, each in converted(model).items()} == names.shapes
    with pytest.raises(ValueError, match="cannot be filled .* Use vLLM or a server"):
        names.views(dict(model.state_dict()))


def test_regions_of_interleaved_rows() -> None:
    """Elements that are not evenly spaced raise an error."""
    config = AutoConfig.for_model(**{**QWEN2, "model_type": "inkling2_text", "hidden_size": 64})
    with torch.device("meta"):
        names = CheckpointNames(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match="gate_up_proj cannot be filled"):
        names.regions("model.layers.0.mlp.experts.gate_up_proj")


@families
def test_apply_weights_in_file_form(config: dict[str, Any]) -> None:
    source, target = model_of(config, seed=1), model_of(config, seed=2)
    parameters = {name: each.data_ptr() for name, each in target.named_parameters()}
    apply_weights(target, arriving(converted(source)))
    assert {name: each.data_ptr() for name, each in target.named_parameters()} == parameters
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


def test_apply_weights_missing_expert() -> None:
    model = model_of(MIXTRAL)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    tensors = converted(model_of(MIXTRAL, seed=1))
    del tensors[EXPERT["mixtral"]]
    with pytest.raises(ValueError, match=f"1 missing: {EXPERT['mixtral']}"):
        apply_weights(model, arriving(tensors))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 30])
def test_publish_in_file_form(make: Make, bucket_bytes: int) -> None:
    engine = make(model=MIXTRAL, seed=3)
    form = WeightFormat(
        dtype="bfloat16", names=(("^model", "policy"),), bucket_bytes=bucket_bytes, checksum=True
    )
    sent, whole = engine.publish_weights(MemoryTarget(version=0), form), engine.export_weights()
    assert isinstance(sent, WeightsInMemory)
    assert whole is not None
    assert EXPERT["mixtral"] in whole
    expected = {form.name_of(name): tensor.bfloat16() for name, tensor in whole.items()}
    assert sent.tensors.keys() == sent.checksums.keys() == expected.keys()
    assert all(torch.equal(sent.tensors[name], each) for name, each in expected.items())


@pytest.mark.parametrize("config", [QWEN3_MOE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_server_refuses_names_it_would_skip(config: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(config)
    model.config.save_pretrained(tmp_path)
    forms = expected_of(str(tmp_path))
    require_fit(forms, {name: each.shape for name, each in converted(model).items()})
    in_memory = {name: each.shape for name, each in named_tensors(model).items()}
    with pytest.raises(ValueError, match=r"missing: .*experts\.0\..*unexpected: .*gate_up_proj"):
        require_fit(forms, in_memory)


@families
def test_export_equals_published(make: Make, config: dict[str, Any], tmp_path: Path) -> None:
    engine = make(model=config, seed=3)
    exported = engine.export_weights()
    engine.export_hf(str(tmp_path / "model"))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert exported is not None
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
