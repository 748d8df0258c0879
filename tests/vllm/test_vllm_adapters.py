"""Test LoRA adapters in vLLM against the model into which they are merged."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from helmsman.api.errors import EngineDeadError
from helmsman.api.generation import SamplingParams
from helmsman.api.weights import WeightsOnDisk
from helmsman.engines.vllm_engine import VLLMEngine
from helmsman.engines.weights import PartialWeightUpdateError
from tests.vllm.vllm_adapters import (
    RANK,
    merge,
    merged_model,
    require_switches,
    sent,
    write_peft,
)
from tests.vllm.vllm_models import (
    ENGINE,
    LLAMA,
    MAX_LEN,
    differences,
    folder_of,
    model_of,
    weights_of,
)
from tests.vllm.vllm_served import Fatal, Served, broadcast, hand_over, require_the_trainers

pytestmark = pytest.mark.timeout(300)  # a start takes 15 s, and 60 s beside other work


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, folder = model_of(LLAMA, seed=1), tmp_path_factory.mktemp("llama")
    first = write_peft(model, 1, folder / "first")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        engine = VLLMEngine(
            model=folder_of(model, folder),
            max_lora_rank=RANK,
            max_loras=2,
            adapters={"first": first},
            adapter="first",
            **ENGINE,
        )
        engine.initialize()
        yield Served(engine, merged_model(LLAMA, 1, first))
        engine.destroy()


async def test_adapter_of_a_request(served: Served, tmp_path: Path) -> None:
    await require_the_trainers(served, "adapter of the start")
    base, merged = model_of(LLAMA, seed=1), served.model
    second = write_peft(base, 2, tmp_path / "second")
    await served.engine.load_lora("second", second)
    await require_the_trainers(served, "another one loaded")
    for name, model in (("second", merged_model(LLAMA, 1, second)), ("", base), ("first", merged)):
        await served.engine.use_lora(name)
        served.model = model
        await require_the_trainers(served, f"adapter {name!r}")
    with pytest.raises(ValueError, match="Call use_lora with another"):
        await served.engine.unload_lora("first")
    await served.engine.unload_lora("second")
    with pytest.raises(ValueError, match="there is no adapter 'second'; loaded are: first"):
        await served.engine.use_lora("second")


async def test_adapter_replaced_by_name(served: Served, tmp_path: Path) -> None:
    third = write_peft(model_of(LLAMA, seed=1), 3, tmp_path / "third")
    await served.engine.load_lora("first", third)
    served.model = merged_model(LLAMA, 1, third)
    await require_the_trainers(served, "a replaced adapter")
    write_peft(model_of(LLAMA, seed=1), 4, tmp_path / "third")
    await served.engine.load_lora("first", third)
    served.model = merged_model(LLAMA, 1, third)
    await require_the_trainers(
        served, "an adapter replaced in its folder, whose keys and values are not found again"
    )


async def test_policies_on_one_engine(served: Served, tmp_path: Path) -> None:
    """Two policies get updates in each way, with requests of both in flight."""
    base = model_of(LLAMA, seed=1)
    await served.engine.use_lora()
    policies = [Served(served.engine, base), Served(served.engine.beside(), base)]
    with pytest.raises(ValueError, match="max_loras is 2 for 3 policies; expected the sum of the"):
        served.engine.beside()
    long = SamplingParams(temperature=0.0, max_new_tokens=MAX_LEN - 8)
    begun = [[await each.begun(each.request([7, 8, 9], long))] for each in policies]
    models: list[list[Any]] = [[base], [base]]
    for number, bring in enumerate((in_memory, broadcast, broadcast), 1):
        for index, policy in enumerate(policies):
            folder = write_peft(base, 40 + 10 * index + number, tmp_path / f"{index}-{number}")
            policy.model = merge(base, folder)
            models[index].append(policy.model)
            await bring(policy, policy.model, number, sent(folder))
            begun[index].append(await policy.begun(policy.request([7, 8, 9], long)))
    for index, policy in enumerate(policies):
        await require_the_trainers(policy, f"policy {index}")
        results = await asyncio.gather(*begun[index])
        for number, (model, result) in enumerate(zip(models[index], results, strict=True)):
            assert set(result.versions) == {number}
            assert differences(model, [[7, 8, 9]], [result]).max() < 1e-3
    whole, other = model_of(LLAMA, seed=30), policies[1].engine
    for policy in policies:
        for bring in (in_memory, broadcast):
            with pytest.raises(ValueError, match="a whole model would change the base model of "):
                await bring(policy, whole, 99, weights_of(whole))
        with pytest.raises(ValueError, match=r"^sleep\(\) would change the base model of this in"):
            await policy.engine.sleep()
        await require_the_trainers(policy, "after what was refused")
    ended = await policies[1].begun(policies[1].request([7, 8, 9], long))
    other.destroy()
    assert (await ended).stop_reason == "abort"
    with pytest.raises(RuntimeError, match="the rollout engine is not running"):
        await other.agenerate(served.request([3]))
    served.model = models[0][-1]
    await require_the_trainers(served, "the first policy, alone")


async def in_memory(served: Served, model: Any, version: int, tensors: Any) -> None:
    await served.engine.update_weights(tensors, version)


async def test_trained_adapter(served: Served, tmp_path: Path) -> None:
    """Requests in flight end under the adapter, and the version, that they began with."""
    base = model_of(LLAMA, seed=1)
    await served.engine.use_lora()
    folders = [write_peft(base, 20 + number, tmp_path / str(number)) for number in range(5)]
    merged = [merged_model(LLAMA, 1, folder) for folder in folders]
    await served.engine.update_weights(sent(folders[0]), 10)
    served.model = merged[0]
    await require_the_trainers(served, "an adapter in memory")
    long = SamplingParams(temperature=0.0, max_new_tokens=64)
    begun = await served.begun(served.request([7, 8, 9], long))
    await served.engine.update_weights(sent(folders[1]), 11)
    served.model = merged[1]
    await require_the_trainers(served, "an adapter beside requests of the last one")
    result = await begun
    assert set(result.versions) == {10}
    assert differences(merged[0], [[7, 8, 9]], [result]).max() < 1e-3
    await broadcast(served, merged[2], 12, sent(folders[2]))
    await require_the_trainers(served, "an adapter by broadcasts")
    await hand_over(served, merged[3], 13, sent(folders[3]), 1)
    await require_the_trainers(served, "an adapter by a buffer")
    save_file(sent(folders[4]), tmp_path / "model-1.safetensors")
    weight_map = dict.fromkeys(sent(folders[4]), "model-1.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    await served.engine.update_weights(WeightsOnDisk(str(tmp_path)), 14)
    served.model = merged[4]
    await require_the_trainers(served, "an adapter in files")
    # The same version again, and then two others take its place in vLLM's memory.
    await served.engine.update_weights(sent(folders[0]), 14)
    for name in ("other", "another"):
        await served.engine.load_lora(name, folders[1])
    served.model = merged[0]
    await require_the_trainers(served, "an adapter read again from its folder")
    for name in ("other", "another"):
        await served.engine.unload_lora(name)
    await served.bring(base, 15)
    await require_the_trainers(served, "a whole model instead of an adapter")


async def test_switches_between_base_and_adapters(served: Served, tmp_path: Path) -> None:
    await served.engine.use_lora()
    await served.bring(model_of(LLAMA, seed=1), 20)
    await require_switches(served, tmp_path)
    await served.bring(model_of(LLAMA, seed=1), 30)


async def test_adapter_base_weights_updated(served: Served, tmp_path: Path) -> None:
    model = model_of(LLAMA, seed=4)
    await served.engine.update_weights(weights_of(model), 1)
    await served.engine.use_lora()
    served.model = model
    await require_the_trainers(served, "new weights beneath adapters")
    await served.engine.use_lora("first")
    served.model = merged_model(LLAMA, 4, write_peft(model, 4, tmp_path / "like the loaded one"))
    await require_the_trainers(served, "an adapter above new weights")


async def test_adapter_read_again_after_dropped_weights(served: Served, tmp_path: Path) -> None:
    """On devices a sleep at level 2 leaves the memory of adapters undefined."""
    folder = write_peft(model_of(LLAMA, seed=4), 5, tmp_path / "own")
    await served.engine.load_lora("own", folder)
    await served.engine.sleep(2)
    write_peft(model_of(LLAMA, seed=4), 6, tmp_path / "own")
    await served.engine.wake()
    await served.engine.update_weights(weights_of(model_of(LLAMA, seed=4)), 2)
    await served.engine.use_lora("own")
    served.model = merged_model(LLAMA, 4, folder)
    await require_the_trainers(served, "an adapter that was read again")
    shutil.move(folder, tmp_path / "elsewhere")
    await served.engine.sleep(2)
    await served.engine.wake()
    with pytest.raises(PartialWeightUpdateError, match="own"):
        await served.engine.update_weights(weights_of(model_of(LLAMA, seed=4)), 3)
    shutil.move(tmp_path / "elsewhere", folder)
    await served.engine.update_weights(weights_of(model_of(LLAMA, seed=4)), 3)
    await require_the_trainers(served, "an adapter whose folder is there again")


async def test_update_death_in_the_middle(served: Served) -> None:
    """The last test of this module, since it ends the shared engine."""
    # the process dies at the first bucket, when loading has begun
    weights = Fatal(weights_of(model_of(LLAMA, seed=5)), at_look=3)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await served.engine.update_weights(weights, 4)
    assert "SIGKILL" in str(served.engine.failure())
    for call in (
        served.engine.agenerate(served.request([3])),
        served.engine.sleep(),
        served.engine.load_lora("a", "nowhere"),
    ):
        with pytest.raises(EngineDeadError):
            await call
    assert served.engine.get_version() == 3
