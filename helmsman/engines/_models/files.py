"""Folders that are created and replaced as a whole, and tensor files in them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def check_replaceable(path: str, mark: str) -> None:
    """Raise FileExistsError unless the path is free, or an empty folder, or one that has ``mark``.

    Replacing removes the old folder, so a path that was meant as the parent of the new folder must
    be refused.
    """
    if not os.path.lexists(path) or os.path.isfile(os.path.join(path, mark)):
        return
    if not os.path.isdir(path) or os.listdir(path):
        what = f"a folder with other files and no {mark}" if os.path.isdir(path) else "no folder"
        raise FileExistsError(
            f"{path} is {what}, and would be replaced; give the path of a new folder, or remove it"
        )


def replace_folder(source: str, path: str) -> None:
    """Rename a folder on the same file system, replacing an existing one."""
    if not os.path.lexists(path):
        os.rename(source, path)
        return
    retired = tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.old.", dir=os.path.dirname(path))
    os.rename(path, os.path.join(retired, "retired"))
    os.rename(source, path)
    shutil.rmtree(retired)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Write tensors of any device to a safetensors file.

    Raises OSError; safetensors only reports its number in the message.
    """
    seen: set[int] = set()
    alone = {}
    for name, tensor in tensors.items():
        whole = tensor.cpu().contiguous()
        # safetensors refuses tensors that share bytes.
        alone[name] = whole.clone() if whole.nbytes and whole.data_ptr() in seen else whole
        seen.add(whole.data_ptr())
    try:
        save_file(alone, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), path) from error
        raise


class FolderWriter:
    """Writes tensors in the Hugging Face layout: safetensors files and finally an index."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: list[list[str]] = []
        """Names of the tensors in each file."""
        self.num_bytes = 0

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._files.append(list(tensors))
        save_tensors(tensors, self._path(f"{len(self._files)}.unnamed"))
        self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(
        self, metadata: Mapping[str, Any] | None = None, *, indexes_one: bool = True
    ) -> None:
        """Name the files and write their index, with ``metadata`` beside the total size.

        Without ``indexes_one``, a single file gets no index and the name model.safetensors.
        """
        count = len(self._files)
        if count == 1 and not indexes_one:
            os.rename(self._path("1.unnamed"), self._path(SINGLE_FILE))
            return
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names, 1):
            os.rename(self._path(f"{number}.unnamed"), self._path(name))
        index = {
            "metadata": {"total_size": self.num_bytes, **(metadata or {})},
            "weight_map": {
                tensor: name
                for name, tensors in zip(names, self._files, strict=True)
                for tensor in tensors
            },
        }
        with open(self._path(INDEX_FILE), "w") as file:
            json.dump(index, file, indent=2)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


class WeightFiles(contextlib.ExitStack):
    """The safetensors files of a folder, mapped into memory while this context is open.

    Args:
        folder: Folder in the Hugging Face layout; without such files there are no shapes.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        index = os.path.join(folder, INDEX_FILE)
        names = [SINGLE_FILE]
        if os.path.exists(index):
            with open(index, "rb") as file:
                names = sorted(set(json.load(file)["weight_map"].values()))
        self._slices: dict[str, Any] = {}
        for path in (os.path.join(folder, name) for name in names):
            if os.path.exists(path):
                tensors = self.enter_context(safe_open(path, framework="pt"))
                self._slices.update(
                    {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
                )
        self.shapes: dict[str, list[int]] = {
            name: list(each.get_shape()) for name, each in self._slices.items()
        }

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor, on the host; one offset and one size for each dimension."""
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        found: torch.Tensor = self._slices[name][box or ...]
        return found


_TOKENIZER_PREFIXES = (
    "tokenizer",
    "vocab",
    "merges",
    "special_tokens",
    "added_tokens",
    "chat_template",
)


def copy_tokenizer(source: str | None, path: str) -> None:
    """Copy the tokenizer files of a folder in the Hugging Face layout, if it has any."""
    if source is not None:
        for entry in os.scandir(source):
            if entry.is_file() and entry.name.startswith(_TOKENIZER_PREFIXES):
                shutil.copy(entry.path, path)
