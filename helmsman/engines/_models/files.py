"""Folders that come and are exchanged as a whole."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def check_replaceable(path: str, mark: str) -> None:
    """Raise FileExistsError unless there is nothing at a path, an empty folder, or one with the file ``mark``.

    What is replaced is removed: a path that was meant as the parent of the new folder must not cost all that is in it.
    """
    if not os.path.lexists(path) or os.path.isfile(os.path.join(path, mark)):
        return
    if not os.path.isdir(path) or os.listdir(path):
        what = f"a folder with other files and no {mark}" if os.path.isdir(path) else "no folder"
        raise FileExistsError(f"{path} is {what}, and would be replaced; give the path of a folder that is new, or remove it")


def replace_folder(source: str, path: str) -> None:
    """Give a folder another name on the same file system, in place of what has it now."""
    if not os.path.lexists(path):
        os.rename(source, path)
        return
    retired = tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.old.", dir=os.path.dirname(path))
    os.rename(path, os.path.join(retired, "retired"))
    os.rename(source, path)
    shutil.rmtree(retired)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Write a safetensors file. Raises: OSError, which safetensors tells by a number in its message."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), path) from error
        raise


_TOKENIZER_PREFIXES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def copy_tokenizer(source: str | None, path: str) -> None:
    """Copy the files of a tokenizer from a folder in the Hugging Face layout, if it has any."""
    if source is not None:
        for entry in os.scandir(source):
            if entry.is_file() and entry.name.startswith(_TOKENIZER_PREFIXES):
                shutil.copy(entry.path, path)
