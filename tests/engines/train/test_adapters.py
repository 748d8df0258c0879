"""Test adapters in training: their arithmetic, layouts, folders and transfers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from helmsman.api.weights import MemoryTarget, WeightFormat, WeightsInMemory
from helmsman.engines._models.adapter_files import PREFIX, read_adapter, write_received
from helmsman.engines._models.adapter_layers import targets_of
from helmsman.engines._models.checkpoint_files import is_checkpoint
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.train import FSDPTrainEngine
from helmsman.engines.weight_transfer import Incoming, incoming
from helmsman.engines.weights import apply_weights
from tests.engines.conftest import Make
from tests.engines.ranks import run_ranks
from tests.engines.small_models import GPT2, LLAMA, MIXTRAL, QWEN2, QWEN3_MOE, VOCAB
from tests.engines.train.layouts import (
    BOTH,
    SAMPLES,
    TENSOR,
    Case,
    mean_loss,
    require_equal,
    run_cases,
)

pytestmark = pytest.mark.timeout(300)

LORA = {"rank": 3, "alpha": 6.0}
CASES = [
    Case(2, "llama", {"lora": LORA}),
    Case(2, "llama", {"lora": LORA, **TENSOR, "gradient_checkpointing": True}),
    Case(4, "llama", {"lora": LORA, **BOTH}),
]


class LowRank(torch.nn.Module):
    """W + alpha / r * B A, for torch's parametrize."""

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        super().__init__()
        self.low, self.high = torch.nn.Parameter(low.clone()), torch.nn.Parameter(high.clone())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + LORA["alpha"] / LORA["rank"] * self.high @ self.low


def trained(make: Make, num_steps: int = 3, **fields: Any) -> FSDPTrainEngine:
    engine = make(**{"model": LLAMA, "lora": LORA, **fields})
    for _ in range(num_steps):
        engine.train_batch(SAMPLES, "sft")
    return engine


def require_same(one: list[torch.Tensor], other: list[torch.Tensor], most: float = 1e-4) -> None:
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, atol=most, rtol=most)


def test_train_equals_restatement(make: Make, tmp_path: Path) -> None:
    """The same losses as plain torch, where W + scale * B A is a parametrization."""
    engine = trained(make, 0)
    initial = engine.forward(SAMPLES)
    base = engine.export_weights()
    assert base is not None
    engine.export_adapter(str(tmp_path / "adapter"))
    _, parts = read_adapter(str(tmp_path / "adapter"))
    reference: Any = AutoModelForCausalLM.from_config(
        engine._built_model().config, attn_implementation="sdpa"
    )
    reference.load_state_dict(base)
    reference.requires_grad_(requires_grad=False)
    for name in [each.removesuffix(".lora_A") for each in parts if each.endswith(".lora_A")]:
        parametrize.register_parametrization(
            reference.get_submodule(name),
            "weight",
            LowRank(parts[f"{name}.lora_A"], parts[f"{name}.lora_B"]),
        )
    adapters = [each for each in reference.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        loss = mean_loss(reference, SAMPLES)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        stats = engine.train_batch(SAMPLES, "sft")
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    require_same(engine.forward_base(SAMPLES), initial)
    state: Any = engine._optimizer
    assert len(state.state) == len(adapters), "moments exist for adapters only"


def test_base_in_bfloat16_adapters_in_float32(make: Make) -> None:
    model = trained(make, 1, compute_dtype="bfloat16")._built_model()
    found = dict(model.named_parameters())
    assert {each.dtype for name, each in found.items() if "lora" in name} == {torch.float32}
    assert {each.dtype for name, each in found.items() if "lora" not in name} == {torch.bfloat16}
    assert all(each.requires_grad == ("lora" in name) for name, each in found.items())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_layouts_equal_one_rank(num_ranks: int) -> None:
    (alone,) = run_ranks(run_cases, 1, [Case(1, "llama", {"packing": False, "lora": LORA})])
    cases = [case for case in CASES if case.num_ranks == num_ranks]
    results = run_ranks(run_cases, num_ranks, cases)
    for index, case in enumerate(cases):
        require_equal(case, [each[index] for each in results], alone[0])


def test_folders_and_checkpoints_continue(make: Make, tmp_path: Path) -> None:
    """An adapter in PEFT's form, a merged model and a checkpoint hold the same policy."""
    engine = trained(make)
    expected = engine.forward(SAMPLES)
    engine.export_adapter(str(tmp_path / "adapter"))
    engine.export_hf(str(tmp_path / "merged"))
    engine.save(str(tmp_path / "checkpoint"))
    again = make(model=LLAMA, lora={"path": str(tmp_path / "adapter")})
    require_same(again.forward(SAMPLES), expected, 0.0)
    merged = make(model=str(tmp_path / "merged"), frozen=True)
    require_same(merged.forward(SAMPLES), expected)
    next_step = engine.train_batch(SAMPLES, "sft")
    resumed = make(model=LLAMA, lora=LORA, seed=0)
    resumed.load(str(tmp_path / "checkpoint"))
    assert resumed.train_batch(SAMPLES, "sft") == next_step
    engine.load(str(tmp_path / "checkpoint"))
    require_same(engine.forward(SAMPLES), expected, 0.0)
    assert is_checkpoint(str(tmp_path / "checkpoint"))
    with pytest.raises(ValueError, match="holds the adapters of a model without the model itself"):
        make(model=str(tmp_path / "checkpoint"))


def test_model_folder_with_adapters(make: Make, tmp_path: Path) -> None:
    """The base is read after sharding, from a folder whose embeddings are tied."""
    make(model=QWEN2).export_hf(str(tmp_path / "base"))
    engine = trained(make, 2, model=str(tmp_path / "base"))
    expected = engine.forward(SAMPLES)
    engine.export_adapter(str(tmp_path / "adapter"))
    entries = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert entries["base_model_name_or_path"] == str(tmp_path / "base")
    again = make(model=str(tmp_path / "base"), lora={"path": str(tmp_path / "adapter")})
    require_same(again.forward(SAMPLES), expected, 0.0)


def test_publish_adapters_alone_or_merged(make: Make) -> None:
    engine = trained(make)
    expected = engine.forward(SAMPLES)
    target = MemoryTarget(version=engine.get_version())
    alone = engine.publish_weights(target, WeightFormat(adapters=True))
    whole = engine.publish_weights(target, WeightFormat())
    assert isinstance(alone, WeightsInMemory)
    assert isinstance(whole, WeightsInMemory)
    base = make(model=LLAMA)
    model: Any = AutoModelForCausalLM.from_config(
        base._built_model().config, attn_implementation="sdpa"
    ).eval()
    model.load_state_dict(base.export_weights())
    group = WeightGroup(torch.device("cpu"))

    def update(weights: Any) -> list[torch.Tensor]:
        with incoming(weights, group) as arriving:
            apply_weights(model, arriving)
        return logprobs_of_model()

    def logprobs_of_model() -> list[torch.Tensor]:
        rows = []
        for sample in SAMPLES:
            tokens = torch.tensor(sample["input_ids"])
            with torch.no_grad():
                logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            rows.append(torch.cat([torch.zeros(1), logprobs.gather(-1, tokens[1:, None])[:, 0]]))
        return rows

    initial = base.forward(SAMPLES)
    require_same(update(alone), expected)
    require_same(update(base.publish_weights(MemoryTarget(version=0), WeightFormat())), initial)
    require_same(update(alone), expected)

    def lost() -> Iterator[dict[str, torch.Tensor]]:
        yield from ()
        raise ConnectionError("the trainer is gone")

    shapes = {name: tuple(each.shape) for name, each in whole.tensors.items()}
    with pytest.raises(ConnectionError):
        apply_weights(model, Incoming(shapes, lost()))
    require_same(logprobs_of_model(), expected)
    require_same(update(whole), expected)
    cut = {name: each for name, each in alone.tensors.items() if "layers.0" in name}
    wrong = {name.replace("layers.0", "layers.9"): each for name, each in cut.items()}
    with pytest.raises(ValueError, match=r"layers\.9\.self_attn\.q_proj of the model is no linear"):
        update(WeightsInMemory(wrong, {}))
    only_b = {name: each for name, each in cut.items() if "lora_B" in name}
    with pytest.raises(ValueError, match="only one matrix for model.layers.0"):
        update(WeightsInMemory(only_b, {}))
    group.close()
    with pytest.raises(RuntimeError, match="has no adapters to send or to write"):
        base.publish_weights(MemoryTarget(version=0), WeightFormat(adapters=True))


def test_write_received_by_an_instance_that_takes_none() -> None:
    with pytest.raises(ValueError, match="max_lora_rank is 0, or it spans nodes"):
        write_received("", [{"base_model.model.layer.lora_A.weight": torch.ones(1, 2)}])


def test_targets_by_name_and_expression(make: Make) -> None:
    def layers(targets: Any) -> set[str]:
        model = make(model=LLAMA, lora={**LORA, "targets": targets})._built_model()
        return {name.rpartition(".")[0] for name, _ in model.named_parameters() if "lora_A" in name}

    attention = {
        f"model.layers.{n}.self_attn.{each}" for n in (0, 1) for each in ("q_proj", "v_proj")
    }
    assert layers(["q_proj", "self_attn.v_proj"]) == attention
    assert layers(r".*layers\.\d\.self_attn\.[qv]_proj") == attention
    assert len(layers("all-linear")) == len(layers(["all-linear"])) == 2 * 7
    with pytest.raises(ValueError, match="lora.targets has 'q_porj'.*did you mean 'q_proj'"):
        layers(["q_porj"])
    with pytest.raises(ValueError, match="matches no linear layer of LlamaForCausalLM"):
        layers("transformer.*")
    with pytest.raises(ValueError, match="lora.targets has 'lm_head'.*besides the output layer"):
        layers(["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="which matches lm_head, expected linear layers besides t"):
        layers(".*(q_proj|lm_head)")
    with pytest.raises(ValueError, match="'gate_up_proj'.*did you mean 'experts.gate_up_proj'"):
        make(model=MIXTRAL, lora={**LORA, "targets": ["gate_up_proj"]})
    with pytest.raises(ValueError, match="GPT2LMHeadModel has 0 linear layers that can have"):
        make(model=GPT2, lora=LORA)
    with pytest.raises(ValueError, match="a frozen engine trains no adapters"):
        make(model=LLAMA, lora=LORA, frozen=True)


EXPERTS = {**LORA, "targets": ["experts.gate_up_proj", "experts.down_proj", "q_proj"]}
GPT_OSS: dict[str, Any] = {
    **QWEN3_MOE,
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "sliding_window": 8,
}
"""Its experts have their inputs first."""
MIXTURES = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS}


@pytest.mark.parametrize("config", MIXTURES.values(), ids=list(MIXTURES))
def test_experts_of_one_tensor(make: Make, tmp_path: Path, config: dict[str, Any]) -> None:
    """A trained policy is the same merged, from its folder, and received by a rollout model."""
    make(model=config).export_hf(str(tmp_path / "base"))
    engine = trained(make, 0, model=str(tmp_path / "base"), lora=EXPERTS, packing=False)
    initial = engine.forward(SAMPLES)
    first, *_, last = (engine.train_batch(SAMPLES, "sft")["loss"] for _ in range(4))
    assert last < first
    expected = engine.forward(SAMPLES)
    require_same(engine.forward_base(SAMPLES), initial)
    trained_names = {
        name.rpartition("layers.")[2]
        for name, each in engine._built_model().named_parameters()
        if each.requires_grad
    }
    assert len(trained_names) == 2 * 3 * 2
    assert any(name.endswith("experts.lora.gate_up_proj.lora_A") for name in trained_names)
    engine.export_adapter(str(tmp_path / "adapter"))
    engine.export_hf(str(tmp_path / "merged"))
    read = {"lora": {"path": str(tmp_path / "adapter")}, "packing": False}
    again = make(model=str(tmp_path / "base"), **read)
    require_same(again.forward(SAMPLES), expected, 0.0)
    merged = make(model=str(tmp_path / "merged"), frozen=True, packing=False)
    require_same(merged.forward(SAMPLES), expected)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    target, group = MemoryTarget(version=engine.get_version()), WeightGroup(torch.device("cpu"))
    for form in (WeightFormat(adapters=True), WeightFormat(adapters=True), WeightFormat()):
        received: Any = engine.publish_weights(target, form)
        with incoming(received, group) as arriving:
            apply_weights(model, arriving)
        for sample, row in zip(SAMPLES, expected, strict=True):
            ids = torch.tensor(sample["input_ids"])
            with torch.no_grad():
                logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            found = logprobs.gather(-1, ids[1:, None])[:, 0]
            torch.testing.assert_close(found, row[1:], atol=1e-4, rtol=1e-4)
    group.close()
    sent = engine.publish_weights(target, WeightFormat(adapters=True))
    assert isinstance(sent, WeightsInMemory)
    with pytest.raises(ValueError, match=r"experts that are one tensor, .*Give sync\.lora: merged"):
        write_received(str(tmp_path / "received"), [sent.tensors])


def test_experts_refused(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora\.dropout is 0\.1, .*experts\.gate_up_proj"):
        make(model=MIXTRAL, lora={**EXPERTS, "dropout": 0.1})
    folder = tmp_path / "adapter"
    trained(make, 0, model=MIXTRAL, lora=EXPERTS).export_adapter(str(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: each for name, each in tensors.items() if "0.mlp.experts.lora" not in name}
    save_file(kept, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.mlp\.experts, a tensor of its"):
        make(model=MIXTRAL, lora={"path": str(folder)})
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"lora_A of the adapter has the shape .* another model"):
        make(model={**MIXTRAL, "num_local_experts": 2}, lora={"path": str(folder)})


def test_experts_two_ranks_equal_one() -> None:
    fields = {"lora": EXPERTS}
    (alone,) = run_ranks(run_cases, 1, [Case(1, "mixtral", {"packing": False, **fields})])
    cases = [Case(2, "mixtral", fields)]
    results = run_ranks(run_cases, 2, cases)
    require_equal(cases[0], [each[0] for each in results], alone[0])


def test_subclasses_with_own_forward_left_out() -> None:
    """Routers of mixtures of experts inherit from nn.Linear and return several tensors."""

    class Router(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> Any:
            return super().forward(hidden), hidden

    model = torch.nn.ModuleDict({"gate": Router(4, 2), "up_proj": torch.nn.Linear(4, 4)})
    assert targets_of(model, "all-linear") == ("up_proj",)
    with pytest.raises(ValueError, match="lora.targets has 'gate'"):
        targets_of(model, ["gate"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "has use_dora: true, expected no use_dora"),
        ({"modules_to_save": ["lm_head"]}, r'has modules_to_save: \["lm_head"\]'),
        ({"rank_pattern": {"q_proj": 8}}, "has rank_pattern"),
        ({"peft_type": "IA3"}, 'has peft_type: "IA3"'),
        ({"init_lora_weights": "pissa_niter_4"}, 'has init_lora_weights: "pissa_niter_4"'),
        ({"lora_alpha": None}, "has lora_alpha: null, expected a number above 0"),
        ({"r": 5}, r"r is 5, but the matrices have \[3\]"),
    ],
    ids=["dora", "saved", "pattern", "ia3", "changed-base", "alpha", "rank"],
)
def test_read_other_adapters_refused(
    make: Make, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "adapter"
    trained(make, 0).export_adapter(str(folder))
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        make(model=LLAMA, lora={"path": str(folder)})


def test_read_incomplete_adapters_refused(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    trained(make, 0).export_adapter(str(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    for changed, message in (
        ({key: each for key, each in tensors.items() if key != name}, "lacks"),
        ({**tensors, "base_model.model.lm_head.weight": torch.ones(2, 2)}, "has base_model.model"),
        ({}, "is empty"),
    ):
        save_file(changed, folder / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            make(model=LLAMA, lora={"path": str(folder)})
    part = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_"
    head = {
        f"{PREFIX}lm_head.lora_A.weight": tensors[f"{part}A.weight"].clone(),
        f"{PREFIX}lm_head.lora_B.weight": torch.zeros(VOCAB, 3),
    }
    save_file({**tensors, **head}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="has lm_head, which is no linear layer of .* besides its"):
        make(model=LLAMA, lora={"path": str(folder)})
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="it belongs to another model"):
        make(model={**LLAMA, "hidden_size": 64}, lora={"path": str(folder)})
    os.rename(folder / "adapter_model.safetensors", folder / "adapter_model.bin")
    with pytest.raises(
        ValueError, match=r"adapter_model.safetensors cannot be read \(No such file"
    ):
        make(model=LLAMA, lora={"path": str(folder)})
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read"):
        make(model=LLAMA, lora={"path": str(tmp_path)})
