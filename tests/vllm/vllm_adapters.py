"""Adapters with random weights, as PEFT folders and as a trainer sends them, and merged models."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from helmsman.api.generation import SamplingParams
from tests.vllm.vllm_models import LLAMA, MAX_LEN, differences, model_of, report, weights_of
from tests.vllm.vllm_served import Served, require_the_trainers

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj", "down_proj")


def write_peft(model: Any, seed: int, folder: Path) -> str:
    """Write an adapter in PEFT's layout."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights_of(model).items():
        if any(f".{target}." in name for target in TARGETS):
            path = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{path}.lora_A.weight"] = (
                torch.randn(RANK, weight.shape[1], generator=generator) * 0.1
            )
            tensors[f"{path}.lora_B.weight"] = (
                torch.randn(weight.shape[0], RANK, generator=generator) * 0.1
            )
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": TARGETS,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def merged_model(config: dict[str, Any], seed: int, adapter: str) -> Any:
    """Return a model into which a PEFT folder is merged."""
    return merge(model_of(config, seed), adapter)


def merge(base: Any, adapter: str) -> Any:
    """Return a copy of a model into which a PEFT folder is merged."""
    model = copy.deepcopy(base)
    tensors = load_file(f"{adapter}/adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            path = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{path}.lora_A.weight" in tensors:
                weight += (
                    ALPHA
                    / RANK
                    * tensors[f"{path}.lora_B.weight"]
                    @ tensors[f"{path}.lora_A.weight"]
                )
    return model


def sent(adapter: str) -> dict[str, torch.Tensor]:
    """Return an adapter as a trainer sends it: by its names in files, with the scale in B."""
    return {
        name: tensor * (ALPHA / RANK if "lora_B" in name else 1)
        for name, tensor in load_file(f"{adapter}/adapter_model.safetensors").items()
    }


async def require_switches(served: Served, folder: Path) -> None:
    """Require exact versions of requests in flight: of the base, adapters and a whole model.

    The engine serves the weights of ``served.model``, and no adapter.
    """
    first, prompt, base = served.engine.get_version(), [7, 8, 9], served.model
    long = SamplingParams(temperature=0.0, max_new_tokens=MAX_LEN - 8)
    adapters = [write_peft(base, 20 + number, folder / str(number)) for number in (1, 2)]
    models, whole = [base, *(merge(base, each) for each in adapters)], model_of(LLAMA, seed=30)
    begun = [await served.begun(served.request(prompt, long), 60)]
    for number, adapter in enumerate(adapters, 1):
        await served.engine.update_weights(sent(adapter), first + number)
        begun.append(await served.begun(served.request(prompt, long), 60))
    await served.bring(whole, first + 3)
    await require_the_trainers(served, "a whole model beside requests of adapters")
    for number, result in enumerate(await asyncio.gather(*begun)):
        count = result.versions.count(first + number)
        length = len(result.token_ids)
        assert 0 < count < length
        assert result.versions == [first + number] * count + [first + 3] * (length - count)
        parts = [(models[number], prompt, 0, count)]
        if number:  # requests of the base may go on with its keys and values
            parts.append((whole, [*prompt, *result.token_ids[:count]], count, length))
        for model, before, start, stop in parts:
            part = msgspec.structs.replace(
                result,
                token_ids=result.token_ids[start:stop],
                logprobs=result.logprobs[start:stop],
            )
            found = differences(model, [before], [part])
            report(f"request {number}, tokens from {start} on", found)
            assert found.max() < 1e-3
