"""Test the parts of VLLMEngine that need no vLLM: configuration, messages, buckets and fit."""

from __future__ import annotations

import multiprocessing
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from helmsman.api.errors import BackendNotInstalledError
from helmsman.engines._vllm.internals import UnsupportedVLLMError, prepare_environment, probe
from helmsman.engines._vllm.transfer import read_shared, shared, split
from helmsman.engines._weights.fit import expected_of, require_fit
from helmsman.engines.vllm_config import VLLMConfig
from helmsman.engines.vllm_engine import VLLMEngine, async_engine_arguments
from tests.engines.small_models import LLAMA, QWEN2

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(7, dtype=torch.bfloat16).reshape(7, 1),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
}


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({}, None),
        ({"tensor_parallel_size": 2}, "mp"),
        ({"pipeline_parallel_size": 2}, "mp"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "ray"),
        (
            {"tensor_parallel_size": 2, "engine_args": {"distributed_executor_backend": "uni"}},
            "uni",
        ),
    ],
)
def test_vllm_engine_executor_backend(fields: dict[str, Any], backend: str | None) -> None:
    """In a Ray placement group, vLLM's own choice would be ``ray``, which refuses our bundles."""
    arguments = async_engine_arguments(VLLMConfig(model="anywhere", **fields))
    assert arguments.get("distributed_executor_backend") == backend


def test_vllm_engine_arguments_for_throughput() -> None:
    arguments = async_engine_arguments(VLLMConfig(model="anywhere", max_concurrency=96))
    assert (arguments["stream_interval"], arguments["max_num_seqs"]) == (8, 96)


def test_vllm_environment_npu_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ", raising=False)
    prepare_environment()
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0"


def test_vllm_engine_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BackendNotInstalledError, match=r"pip install 'helmsman-rl\[vllm\]'"):
        VLLMEngine(model="anywhere")


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        ("json", "JSONDecoder.nothing", "has no attribute 'nothing'"),
        ("json.nothing", "anything", "No module named 'json.nothing'"),
    ],
)
def test_probe_names_missing_internal(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, error: str
) -> None:
    installed = types.ModuleType("vllm")
    installed.__version__ = "0.31.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", installed)
    there = {"json": "JSONDecoder.decode dumps"}
    probe(there)
    with pytest.raises(
        UnsupportedVLLMError, match=f"vLLM, 0.31.2, lacks {module}.{name}, which .*: .*{error}"
    ):
        probe({**there, module: name})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_concurrency": 0}, "max_concurrency is 0; expected 1 or more"),
        ({"close_timeout_s": 0.0}, "close_timeout_s is 0.0; expected more than 0"),
        (
            {"engine_args": {"max_num_seqs": 512}},
            "engine_args has 'max_num_seqs', .* set VLLMConfig.max_concurrency",
        ),
        (
            {"engine_args": {"worker_extension_cls": "mine"}},
            "engine_args has 'worker_extension_cls', .* leave it out",
        ),
        ({"adapters": {"a": "there"}}, "max_lora_rank is 0"),
        (
            {"engine_args": {"data_parallel_size": 2}},
            r"data_parallel_size 2; expected 1, .* Use more instances: Job\(replicas=",
        ),
        (
            {"max_lora_rank": 8, "adapters": {"a": "there"}, "adapter": "b"},
            "adapter is 'b'; expected a name in adapters, which has a",
        ),
        ({"adapter": "b"}, "adapter is 'b'; expected a name in adapters, which is empty"),
    ],
)
def test_vllm_config_invalid_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMConfig(model="anywhere", **fields)


def _read(message: dict[str, Any], results: Any) -> None:
    results.put(
        {
            name: (str(each.dtype), each.tolist(), list(each.shape))
            for name, each in read_shared(message).items()
        }
    )


def test_read_shared_in_another_process() -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with shared(TENSORS) as message:
        reader = context.Process(target=_read, args=(message, results))
        reader.start()
        found = results.get(timeout=60)
        reader.join()
        kept = read_shared(message)
    assert found == {
        name: (str(each.dtype), each.tolist(), list(each.shape)) for name, each in TENSORS.items()
    }
    assert torch.equal(kept["turned"], TENSORS["turned"]), "mapped memory stays with who has it"
    assert not os.path.exists(message["path"])


def test_split_max_bytes() -> None:
    tensors = {
        name: torch.zeros(size, dtype=torch.uint8)
        for name, size in {"a": 3, "b": 5, "c": 4, "d": 9, "e": 1}.items()
    }
    assert [list(part) for part in split(tensors, 8)] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(split({}, 8)) == []


def _folder(config: dict[str, Any], folder: Path) -> tuple[str, Any]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(folder)
    return str(folder), model


def _shapes(model: Any) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2 tied"])
def test_require_fit_names_of_model(config: dict[str, Any], tmp_path: Path) -> None:
    folder, model = _folder(config, tmp_path)
    forms, shapes = expected_of(folder), _shapes(model)
    require_fit(forms, shapes)
    without_head = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    if config["tie_word_embeddings"]:
        require_fit(forms, without_head)
    else:
        with pytest.raises(ValueError, match="1 missing: lm_head.weight"):
            require_fit(forms, without_head)
    with pytest.raises(
        ValueError,
        match=r"1 unexpected: more; 1 of another shape: model.norm.weight \(3,\) for \(32,\)",
    ):
        require_fit(forms, {**shapes, "more": [1], "model.norm.weight": [3]})


def test_require_fit_names_of_files(tmp_path: Path) -> None:
    folder, model = _folder(LLAMA, tmp_path)
    renamed = {f"language_model.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(renamed, tmp_path / "model.safetensors")
    forms = expected_of(folder)
    require_fit(forms, _shapes(model))
    require_fit(forms, {name: list(tensor.shape) for name, tensor in renamed.items()})


def test_expected_of_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no configuration that transformers reads"):
        expected_of(str(tmp_path))
