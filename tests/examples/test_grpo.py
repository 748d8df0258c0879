"""Test `make demo`, the script examples/grpo.py on an embedded Ray, and the tokenizer it saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.common.tokens import CharTokenizer, small_model
from helmsman.recipes.tokens import FolderTokenizer
from tests.examples.scripts import output

FLAGS = [
    *("--sft-steps", "2", "--sft-batch", "8", "--steps", "2", "--prompts-per-step", "4"),
    *("--samples-per-prompt", "4", "--num-held-out", "8", "--eval-every", "4"),
]


@pytest.mark.timeout(300)
def test_grpo_demo(tmp_path: Path) -> None:
    printed = output(tmp_path, "grpo.py", "--scheduler", "ray", "--out", "out", *FLAGS)
    assert "held-out accuracy: " in printed
    found = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in found] == list(range(5))
    assert [each["phase"] for each in found] == ["eval", "sft", "sft", "grpo", "grpo"]
    assert found[0]["weight_version"] < found[-1]["weight_version"]
    assert {"summary.json", "curve.png"} <= {each.name for each in (tmp_path / "out").iterdir()}


def test_char_tokenizer_save_loads_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = CharTokenizer(["1, 2", "2, 3"], ["12"])
    tokenizer.save(tmp_path)
    # The class to load depends on the configuration of the model.
    (tmp_path / "config.json").write_text(json.dumps(small_model(tokenizer, max_len=32)))
    loaded = FolderTokenizer(str(tmp_path))
    assert loaded.eos_id == tokenizer.eos_id
    for text in ("1, 2", "12"):
        assert loaded.encode_prompt(text) == tokenizer.encode_prompt(text)
        assert loaded.encode_answer(text) == tokenizer.encode_answer(text)
    assert loaded.decode(tokenizer.encode_answer("1, 2")) == "1, 2"
    with pytest.raises(ValueError, match="there is no model folder 'nowhere'"):
        FolderTokenizer("nowhere")
