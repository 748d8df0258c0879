"""Test which model folders are read, and the messages for all others, by headers alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from helmsman.engines._models.model import build_model
from helmsman.engines._server.weights import forms_of
from helmsman.engines._weights.model_folder import check_model_folder
from helmsman.engines.rollout import HFRolloutEngine
from tests.engines.conftest import Make
from tests.engines.little_servers import engine_of
from tests.engines.models import folders as made
from tests.engines.models.folders import Change, added, entries, only, renamed, tensors, without
from tests.engines.small_models import (
    DEEPSEEK_V3,
    GEMMA3_MIXED,
    GPT2,
    LLAMA,
    MISTRAL_SLIDING,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT_LINEAR,
)

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
_MLA = {**DEEPSEEK_V3, "n_group": 1}
_OTHERS: list[dict[str, Any]] = [
    {**QWEN3, "model_type": "gemma2"},
    {**LLAMA, "model_type": "phi3"},
    {**_MLA, "model_type": "deepseek_v2"},
    {**QWEN3, "model_type": "glm4"},
    {**QWEN3, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    {**LLAMA, "model_type": "olmo2"},
]
FAMILIES = [
    *(LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL_SLIDING, MIXTRAL, GEMMA3_MIXED, DEEPSEEK_V3, GPT2),
    *(QWEN3_NEXT_LINEAR, *_OTHERS),
]
HEAD = torch.zeros(1, 32)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config["model_type"])
def test_families(config: dict[str, Any], tmp_path: Path) -> None:
    """A folder of save_pretrained fits, and does not without the last of its tensors."""
    check_model_folder(str(made.write(tmp_path, config)), needs_transformers=True)
    lost = list(load_file(tmp_path / made.WEIGHTS))[-1]
    without(lost)(tmp_path)
    with pytest.raises(ValueError, match=f"1 missing: {re.escape(lost)}, expected every tensor of"):
        check_model_folder(str(tmp_path), needs_transformers=True)


def _fused(folder: Path) -> None:
    """Save the experts of a layer as one tensor, as transformers has them in memory."""
    made.write(folder, QWEN3_MOE)
    state = build_model(str(folder), seed=0, dtype=torch.float32).state_dict()
    save_file({name: each.clone() for name, each in state.items()}, folder / made.WEIGHTS)


def _write(config: dict[str, Any], *changes: Change) -> Change:
    def apply(folder: Path) -> None:
        made.write(folder, config)
        for change in changes:
            change(folder)

    return apply


def _tied_twice(folder: Path, factor: float = 1.0) -> None:
    made.write(folder, QWEN2)
    tensors(lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] * factor})(folder)


READ: dict[str, tuple[Change, dict[str, Any]]] = {
    "`model.safetensors`": (lambda _: None, {}),
    "safetensors files with their index": (made.in_shards, {}),
    "`pytorch_model.bin`": (made.as_bin, {}),
    "`.bin` files with their index": (made.as_bin_shards, {}),
    "tied embeddings, head left out": (_write(QWEN2), {}),
    "tied embeddings, embeddings left out": (
        _write(QWEN2, renamed(lambda name: name.replace("model.embed_tokens", "lm_head"))),
        {},
    ),
    "tied embeddings, both there and equal": (_tied_twice, {}),
    "old buffers (`rotary_emb.inv_freq`, `position_ids`)": (
        added(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4)),
        {},
    ),
    "layers for further heads, which transformers skips": (
        _write(DEEPSEEK_V3, added(model__layers__61__eh_proj__weight=torch.ones(4))),
        {},
    ),
    "experts of a layer as one tensor": (_fused, {}),
    "names without the base model's prefix, with a tied head": (
        _write(GPT2, renamed(lambda name: name.removeprefix("transformer."))),
        {},
    ),
    "a reward model for `head='value'`": (made.of_head(1), {"head": "value"}),
    "a policy for `head='value'` with `init='value_head'`": (
        lambda _: None,
        {"head": "value", "init": "value_head"},
    ),
    "a tokenizer smaller than the embedding": (made.with_tokenizer(vocab=96), {}),
    "special tokens beyond the embedding that no chat has": (
        made.with_tokenizer(2, special=True),
        {},
    ),
}
REFUSED: dict[str, tuple[Change, str]] = {
    "a tensor left out": (
        without("layers.1.mlp.down_proj"),
        "1 missing: model.layers.1.mlp.down_proj.weight, .* as a whole",
    ),
    "an untied head left out": (
        without("lm_head"),
        "1 missing: lm_head.weight, .* set tie_word_embeddings to true .* head was lost",
    ),
    "an expert left out": (
        _write(QWEN3_MOE, without("layers.0.mlp.experts.2.up_proj")),
        "1 missing: model.layers.0.mlp.experts.2.up_proj.weight, expected",
    ),
    "a wrapper's prefix": (
        renamed(lambda name: f"module.{name}"),
        "21 missing: .*; 21 unexpected: .* All names begin with 'module.'",
    ),
    "names of a base model, without a head": (
        tensors(
            lambda t: {n.removeprefix("model."): e for n, e in t.items() if "lm_head" not in n}
        ),
        "21 missing: .* The names lack 'model.'",
    ),
    "a tensor too many": (
        added(model__extra__weight=torch.zeros(2)),
        "1 unexpected: model.extra.weight, expected",
    ),
    "fewer layers than `config.json` says": (
        without("layers.1."),
        "9 missing: .* num_hidden_layers 2, and the files have 1 layers",
    ),
    "more layers than `config.json` says": (
        entries(num_hidden_layers=1),
        "9 unexpected: .* num_hidden_layers 1, and the files have 2 layers",
    ),
    "another `vocab_size`": (
        entries(vocab_size=64),
        r"2 of another shape: lm_head.weight \(50, 32\) for \(64, 32\), .* the files have 50 rows",
    ),
    "another shape": (
        entries(intermediate_size=48),
        r"6 of another shape: .*down_proj.weight \(32, 64\) for \(32, 48\)",
    ),
    "empty tensors of ZeRO-3": (
        tensors(lambda t: {n: e if "norm" in n else torch.zeros(0) for n, e in t.items()}),
        r"of another shape: .* \(0,\) for .* python zero_to_fp32.py",
    ),
    "tied tensors that differ": (
        lambda folder: _tied_twice(folder, 2.0),
        "lm_head.weight and model.embed_tokens.weight differ, .* Set tie_word_embeddings to false",
    ),
    "a file of the index missing": (
        made.one_shard_less,
        r"1 of \d+ weight files are missing: model-00002-of-\d+.safetensors, .* again",
    ),
    "an index of other files": (
        _write(
            LLAMA,
            made.in_shards,
            entries(made.INDEX, weight_map={"lost": "model-00001"}),
        ),
        "1 of 1 weight files are missing: model-00001",
    ),
    "two sets of safetensors files": (
        made.in_shards_too,
        "it has model.safetensors and also model-00001.*, and programs differ .* Remove",
    ),
    "a pointer of Git LFS": (
        made.as_lfs_pointer,
        "model.safetensors is the pointer of Git LFS, .* Run 'git lfs pull'",
    ),
    "a truncated file": (made.cut, r"model.safetensors \(\d+ bytes\) is damaged or incomplete"),
    "a `.bin` file that is none": (
        _write(LLAMA, made.as_bin, made.text("pytorch_model.bin", "<html>")),
        r"pytorch_model.bin \(6 bytes\) is damaged or incomplete",
    ),
    "no weights": (only("config.json"), "it has no weights, expected model.safetensors, or"),
    "no `config.json`": (only(made.WEIGHTS), "it has no config.json and looks like safetensors"),
    "`config.json` that is not JSON": (
        made.text("config.json", "{"),
        "config.json cannot be read as JSON: .*, expected an object.* again",
    ),
    "`config.json` without `model_type`": (
        made.text("config.json", '{"dim": 8}'),
        "config.json has no model_type; it has dim, expected",
    ),
    "an unknown `model_type`": (
        entries(model_type="nonesuch"),
        "cannot build it: 'nonesuch': .* newer transformers",
    ),
    "an architecture of another `model_type`": (
        entries(architectures=["Qwen2ForCausalLM"]),
        "the architecture Qwen2ForCausalLM and the model_type 'llama', expected LlamaForCausalLM",
    ),
    "a reward model as a policy": (
        made.of_head(1),
        "it holds a LlamaForSequenceClassification, which does not predict tokens, .* 'value'",
    ),
    "a value head of TRL": (
        added(v_head__summary__weight=HEAD, v_head__summary__bias=torch.zeros(1)),
        "2 unexpected: v_head.summary.* save model.pretrained_model",
    ),
    "a critic of OpenRLHF as a policy": (
        _write(LLAMA, without("lm_head"), added(score__weight=HEAD)),
        "1 missing: lm_head.weight; 1 unexpected: score.weight, .* critic or reward model",
    ),
    "`quantization_config` (GPTQ, AWQ, bitsandbytes, FP8)": (
        entries(quantization_config={"quant_method": "awq", "bits": 4}),
        r"its weights are quantised \(quantization_config in config.json: awq\), .* dequantize",
    ),
    "quantised tensors": (
        tensors(lambda t: {n: e if "norm" in n else e.to(torch.int8) for n, e in t.items()}),
        "quantised: .* I8, .* use the unquantised model",
    ),
    "an adapter of PEFT": (
        only("adapter_config.json", "adapter_model.safetensors"),
        "it has no config.json and looks like a PEFT adapter .*merge_and_unload",
    ),
    "an adapter beside its base model": (
        entries("adapter_config.json", r=8),
        "it holds a PEFT adapter .*merge_and_unload",
    ),
    "a checkpoint of DeepSpeed": (
        only("config.json", "zero_to_fp32.py", "global_step5/mp_rank_00_model_states.pt"),
        "it has no weights and looks like a DeepSpeed checkpoint .* zero_to_fp32.py . OUTPUT",
    ),
    "a checkpoint of FSDP": (only("__0_0.distcp", ".metadata"), "torch.distributed checkpoint"),
    "a checkpoint of verl": (
        only("model_world_size_2_rank_0.pt", "huggingface/config.json"),
        "an FSDP checkpoint of verl .* verl.model_merger",
    ),
    "GGUF": (only("model-q4.gguf"), "looks like a GGUF file .* converted from"),
    "Meta's or Mistral's own layout": (
        only("params.json", "consolidated.00.pth"),
        "weights in Meta's or Mistral's own layout",
    ),
    "a tokenizer alone": (only("tokenizer.json"), "looks like a tokenizer .* its model"),
    "a folder above the model": (
        lambda folder: (only()(folder), made.write(folder / "snapshots" / "5f0a")),
        "it has no config.json, but .*/snapshots/5f0a is a model, .* Give that folder",
    ),
    "a larger tokenizer": (
        made.with_tokenizer(1),
        r"its tokenizer writes 1 tokens from 82 on \('<more-0>' 82\), .* resize_token_embeddings",
    ),
    "the tokenizer of another model": (
        made.with_tokenizer(vocab=40),
        "its tokenizer writes 42 tokens from 40 on .* and the embedding has 40 rows",
    ),
    "an end token beyond the embedding": (
        lambda folder: (
            made.with_tokenizer(1, special=True)(folder),
            entries("tokenizer_config.json", eos_token="<more-0>")(folder),
        ),
        "its tokenizer writes 1 tokens from 82 on",
    ),
}


@pytest.mark.parametrize("form", READ)
def test_read(form: str, tmp_path: Path) -> None:
    change, fields = READ[form]
    change(made.write(tmp_path))
    check_model_folder(str(tmp_path), needs_transformers=True, **fields)
    build_model(str(tmp_path), seed=0, dtype=torch.float32, head=fields.get("head", "lm"))


@pytest.mark.parametrize("form", REFUSED)
def test_refused(form: str, tmp_path: Path) -> None:
    change, message = REFUSED[form]
    change(made.write(tmp_path))
    with pytest.raises(ValueError, match=f"(?s){message}") as caught:
        check_model_folder(str(tmp_path), needs_transformers=True)
    assert f"the model folder cannot be used ({tmp_path}): " in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Qwen/Qwen3-0.6B", "no model folder 'Qwen/Qwen3-0.6B' .* hf download Qwen/Qwen3-0.6B"),
        ("/nowhere/model", "no model folder '/nowhere/model' on this worker: .* every worker"),
        ("~/model", "Write the home folder in full: /"),
        (__file__, "it is a file, expected a folder. Give /"),
    ],
)
def test_refused_paths(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model_folder(given)


def test_policy_for_a_value_head_without_init(tmp_path: Path) -> None:
    made.write(tmp_path)
    with pytest.raises(
        ValueError, match="1 missing: score.weight, .* set TrainConfig.init to 'value_head'"
    ):
        check_model_folder(str(tmp_path), head="value")


def test_reward_model_of_two_labels(tmp_path: Path) -> None:
    made.write(tmp_path, auto=AutoModelForSequenceClassification, num_labels=2, pad_token_id=0)
    with pytest.raises(ValueError, match=r"score.weight \(2, 32\) for \(1, 32\)"):
        check_model_folder(str(tmp_path), head="value")


def test_unknown_architectures_are_left_to_servers(tmp_path: Path) -> None:
    made.write(tmp_path)
    entries(model_type="nonesuch")(tmp_path)
    check_model_folder(str(tmp_path))
    made.as_lfs_pointer(tmp_path)
    with pytest.raises(ValueError, match="pointer of Git LFS"):
        check_model_folder(str(tmp_path))


def test_engines_agree(make: Make, tmp_path: Path) -> None:
    folder = str(made.write(tmp_path))
    without("layers.1.mlp.down_proj")(tmp_path)
    messages = set()
    with engine_of("vllm", folder) as server:
        for begin in (
            lambda: make(model=folder),
            lambda: make(model=folder, frozen=True),
            lambda: HFRolloutEngine(model=folder).initialize(),
            server.initialize,
        ):
            with pytest.raises(ValueError, match="1 missing") as caught:
                begin()
            messages.add(str(caught.value))
    assert len(messages) == 1


def test_server_with_other_weights(tmp_path: Path) -> None:
    """A server may be asked for random weights, or for quantised ones."""
    made.write(tmp_path)
    (tmp_path / made.WEIGHTS).unlink()
    assert forms_of(str(tmp_path), ("--load-format=dummy",))
    with pytest.raises(ValueError, match="it has no weights"):
        forms_of(str(tmp_path), ("--seed", "1"))
    with pytest.raises(ValueError, match="no model folder"):
        forms_of(str(tmp_path / "none"), ("--quantization", "fp8"))


def test_page_lists_the_forms() -> None:
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert not ({*READ, *REFUSED} - {*rows})
