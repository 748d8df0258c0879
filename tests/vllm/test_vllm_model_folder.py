"""Test that vLLM refuses a model folder as the other engines do, before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman.engines._weights.model_folder import check_model_folder
from helmsman.engines.vllm_engine import VLLMEngine, async_engine_arguments
from tests.engines.models import folders as made
from tests.engines.models.folders import Change


@pytest.mark.parametrize(
    "change",
    [
        made.without("lm_head"),
        made.renamed(lambda name: f"module.{name}"),
        made.entries(num_hidden_layers=1),
        made.entries(quantization_config={"quant_method": "gptq"}),
        made.one_shard_less,
        made.as_lfs_pointer,
        made.with_tokenizer(1),
    ],
    ids=["head", "prefix", "layers", "quantised", "shard", "LFS", "tokenizer"],
)
def test_refuses_as_others_do(change: Change, tmp_path: Path) -> None:
    folder = str(made.write(tmp_path))
    change(tmp_path)
    with pytest.raises(ValueError, match="cannot be used") as expected:
        check_model_folder(folder)
    with pytest.raises(ValueError, match="cannot be used") as refused:
        VLLMEngine(model=folder).initialize()
    assert str(refused.value) == str(expected.value)


def test_reads_the_files_of_the_others() -> None:
    """With "auto" vLLM would read consolidated.safetensors of Mistral's own layout."""
    engine = VLLMEngine(model="anywhere")
    assert async_engine_arguments(engine.config)["load_format"] == "hf"
