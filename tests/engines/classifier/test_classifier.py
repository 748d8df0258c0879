"""Test the engine of reward models: scores are those of transformers, in any batch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from helmsman.api.generation import GenerationRequest
from helmsman.engines.classifier import ClassifierEngine
from tests.engines.small_models import GPT2, QWEN2, VOCAB, random_tokens

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "initializer_range": 0.5,
}
DEBERTA = {
    **BERT,
    "model_type": "deberta-v2",
    "type_vocab_size": 0,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "max_position_embeddings": 64,
}
TEXTS = [random_tokens(length, seed=length) for length in (1, 9, 3, 30, 4)]


def write_model(folder: Path, entries: dict[str, Any], **given: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**entries, **given})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def scores(folder: Path, texts: list[list[int]], **given: Any) -> list[list[float]]:
    """Return the logits of texts that are sent at once."""
    engine = ClassifierEngine(**{"model": str(folder), "max_model_len": 64, **given})
    engine.initialize()

    async def run() -> list[list[float]]:
        requests = [
            GenerationRequest(request_id=str(index), prompt_ids=text)
            for index, text in enumerate(texts)
        ]
        results = await asyncio.gather(*map(engine.agenerate, requests))
        assert all(each.token_ids == [*range(len(each.logprobs))] for each in results)
        return [each.logprobs for each in results]

    try:
        return asyncio.run(run())
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    ("entries", "given"),
    [
        (QWEN2, {"num_labels": 1, "pad_token_id": None}),
        (QWEN2, {"num_labels": 3, "pad_token_id": TEXTS[1][-1]}),
        (GPT2, {"num_labels": 1, "pad_token_id": -1}),
        (BERT, {"num_labels": 2}),
        (DEBERTA, {"num_labels": 1}),
    ],
)
@pytest.mark.usefixtures("on_the_host")
def test_scores_of_batches(tmp_path: Path, entries: dict[str, Any], given: dict[str, Any]) -> None:
    """huggingface/transformers #35352, trl #6952, reward-bench #137: padding moves the score.

    A decoder is read at its last token, also where the tokenizer pads with the end token.
    """
    model = write_model(tmp_path, entries, **given)
    found = scores(tmp_path, TEXTS)
    if given.get("pad_token_id") == -1:
        model.config.pad_token_id = None
    for text, row in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([text])).logits[0]
        assert row == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.usefixtures("on_the_host")
def test_texts_refused(tmp_path: Path) -> None:
    write_model(tmp_path, QWEN2, num_labels=1)
    for text, message in (
        ([], "empty prompt"),
        ([VOCAB], f"token {VOCAB} in its prompt"),
        ([1] * 64, "64 tokens, which leaves no room .* max_model_len=64"),
    ):
        with pytest.raises(ValueError, match=message):
            scores(tmp_path, [text])


def change(folder: Path, config: dict[str, Any], *names: str) -> None:
    """Change entries of a folder's config.json, and add tensors of these names."""
    path, file = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    added = {name: torch.ones(2) for name in names}
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})


@pytest.mark.usefixtures("on_the_host")
def test_missing_head_refused(tmp_path: Path) -> None:
    """transformers draws a random head for a folder of a policy, and warns."""
    config = AutoConfig.for_model(**QWEN2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = "it lacks score.weight, expected a Qwen2ForSequenceClassification with all of its pa"
    with pytest.raises(ValueError, match=expected):
        scores(tmp_path, [[1]])


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        ({}, ["gating.weight"], "it also has gating.weight, expected a Qwen2ForSequenceClassifica"),
        ({}, ["score.bias"], "it also has score.bias"),
        ({}, ["reward_pooler.weight"], "it also has reward_pooler.weight"),
        ({"architectures": ["Qwen2WithGatingForSequenceClassification"]}, [], "is of a Qwen2WithG"),
    ],
)
@pytest.mark.usefixtures("on_the_host")
def test_other_model_refused(
    tmp_path: Path, config: dict[str, Any], names: list[str], message: str
) -> None:
    """ArmoRM's gate, and a head with a bias: transformers leaves them out, and warns."""
    write_model(tmp_path, QWEN2, num_labels=1)
    change(tmp_path, config, *names)
    with pytest.raises(ValueError, match=message):
        scores(tmp_path, [[1]])


@pytest.mark.usefixtures("on_the_host")
def test_adapter_beside_the_model_refused(tmp_path: Path) -> None:
    """transformers adds it, with peft installed, also to a model into which it is merged."""
    write_model(tmp_path, QWEN2, num_labels=1)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    with pytest.raises(ValueError, match=r"it holds a PEFT adapter \(adapter_config.json\)"):
        scores(tmp_path, [[1]])


@pytest.mark.usefixtures("on_the_host")
def test_tensors_of_other_tasks(tmp_path: Path) -> None:
    """twitter-roberta-base-sentiment has a pooler, and many a reward model its policy's head."""
    write_model(tmp_path, QWEN2, num_labels=1)
    alone = scores(tmp_path, TEXTS)
    change(tmp_path, {}, "lm_head.weight", "model.pooler.dense.weight")
    assert scores(tmp_path, TEXTS) == alone


@pytest.mark.usefixtures("on_the_host")
def test_error_of_a_pass(tmp_path: Path) -> None:
    """It fails the texts of the pass, here by positions that the model lacks, and no other."""
    write_model(tmp_path, GPT2, num_labels=1, pad_token_id=0)
    engine = ClassifierEngine(model=str(tmp_path), max_model_len=1000)
    engine.initialize()

    async def one(length: int) -> Any:
        request = GenerationRequest(request_id=str(length), prompt_ids=[1] * length)
        return await engine.agenerate(request)

    async def run() -> Any:
        return await asyncio.gather(one(1), one(200), one(2), return_exceptions=True)

    alone, long, beside = asyncio.run(run())
    assert len(alone.logprobs) == 1
    assert isinstance(long, IndexError)
    assert beside is long
    assert len(asyncio.run(one(2)).logprobs) == 1
    engine.destroy()
