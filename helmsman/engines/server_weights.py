"""Weights as an inference server takes them, whichever way they come: a folder of safetensors that it reads."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from helmsman.api.weights import Weights, WeightsOnDisk
from helmsman.engines.weight_group import WeightGroup
from helmsman.engines.weight_transfer import incoming

_INDEX_FILE = "model.safetensors.index.json"
Shapes = Mapping[str, tuple[int, ...]]


class ModelFolder:
    """What can be known of a model without loading it.

    Args:
        path: in the Hugging Face layout.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        config: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError), open(os.path.join(path, "config.json")) as file:
            config = json.load(file)
        text_config: dict[str, Any] = config.get("text_config", config)
        self.vocab_size: int | None = text_config.get("vocab_size")
        self._is_tied = bool(config.get("tie_word_embeddings", text_config.get("tie_word_embeddings", False)))

    def shapes(self) -> Shapes:
        """Of its parameters by name; empty where it has no safetensors."""
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in sorted(os.listdir(self._path)) if os.path.isdir(self._path) else ():
            if entry.endswith(".safetensors"):
                with safe_open(os.path.join(self._path, entry), framework="pt") as tensors:
                    shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
        return shapes

    def require_fit(self, shapes: Shapes) -> None:
        """Servers take what they find, and go on without the rest. Raises: ValueError."""
        ours = self.shapes()
        if not ours:
            return
        optional = {"lm_head.weight"} if self._is_tied else set()
        problems = {
            "missing": [name for name in ours if name not in shapes and name not in optional],
            "unexpected": [name for name in shapes if name not in ours and name not in optional],
            "of another shape": [
                f"{name} {shape} for {ours[name]}" for name, shape in shapes.items() if name in ours and shape != ours[name]
            ],
        }
        found = [f"{len(items)} {problem}: {', '.join(items[:4])}" for problem, items in problems.items() if items]
        if found:
            raise ValueError(f"the weights do not fit the model in {self._path}, which was left as it is. {'; '.join(found)}")


@contextlib.contextmanager
def as_folder(weights: Weights, group: WeightGroup, model: ModelFolder, exchange_folder: str) -> Iterator[str]:
    """Weights, however they come, as a folder for the server to read; it is there until the end.

    Raises: ValueError where they do not fit the model, or are not those that were sent; ConnectionError; OSError.
    """
    with incoming(weights, group) as arriving:
        model.require_fit(arriving.shapes)
        if isinstance(weights, WeightsOnDisk):
            if _has_checksums(weights.path):
                for _ in arriving:
                    pass  # reading them is what verifies them
            yield weights.path
            return
        path = tempfile.mkdtemp(prefix="weights.", dir=exchange_folder)
        try:
            write_folder(arriving, path)
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _has_checksums(path: str) -> bool:
    with open(os.path.join(path, _INDEX_FILE), "rb") as file:
        return bool(json.load(file)["metadata"].get("crc32"))


def write_folder(buckets: Iterable[Mapping[str, torch.Tensor]], path: str) -> None:
    """Write tensors by name as files with an index, as Hugging Face has them. Raises: OSError where there is no room."""
    files: dict[str, str] = {}
    num_bytes = 0
    for number, bucket in enumerate(buckets):
        name = f"model-{number:05d}.safetensors"
        tensors = {key: tensor.cpu().contiguous() for key, tensor in bucket.items()}
        try:
            save_file(_each_alone(tensors), os.path.join(path, name), metadata={"format": "pt"})
        except OSError as error:
            raise OSError(
                error.errno,
                f"no room for {sum(tensor.nbytes for tensor in tensors.values())} bytes of weights more, after {num_bytes}, in "
                f"{path}: {error}. Free some, or set ServerConfig.exchange_folder to a folder with room for all of them",
            ) from error
        files.update(dict.fromkeys(tensors, name))
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    with open(os.path.join(path, _INDEX_FILE), "w") as file:
        json.dump({"metadata": {"total_size": num_bytes}, "weight_map": files}, file)


def _each_alone(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share no bytes: safetensors writes no two of the same."""
    seen: set[int] = set()
    alone = {}
    for name, tensor in tensors.items():
        is_alone = tensor.nbytes == 0 or tensor.data_ptr() not in seen
        seen.add(tensor.data_ptr())
        alone[name] = tensor if is_alone else tensor.clone()
    return alone
