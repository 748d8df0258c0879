"""Model folders in the Hugging Face layout: which tensors their files hold, by headers alone.

A folder that transformers, vLLM and other programs would read differently is refused here, as is
one that holds something else than a model.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from helmsman.engines._models.files import INDEX_FILE, SINGLE_FILE

_BIN_FILE, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_LFS_MARK = b"version https://git-lfs"
_FLOATS = {
    *("F64", "F32", "F16", "BF16"),
    *map(str, (torch.float64, torch.float32, torch.float16, torch.bfloat16)),
}

_EXPORT = "Write it with save_pretrained, or with export_hf of Helmsman"
_FOREIGN = (
    ("adapter_config.json", "a PEFT adapter", "Merge it into its base model (merge_and_unload)"),
    ("helmsman.json", "a checkpoint of Helmsman", "Export its model with export_hf"),
    ("zero_to_fp32.py", "a DeepSpeed checkpoint", "Run: python zero_to_fp32.py . OUTPUT"),
    ("global_step*", "a DeepSpeed checkpoint", "Merge it with DeepSpeed's zero_to_fp32.py"),
    ("mp_rank_*", "a DeepSpeed checkpoint", "Merge it with DeepSpeed's zero_to_fp32.py"),
    ("model_world_size_*", "an FSDP checkpoint of verl", "Merge it: python -m verl.model_merger"),
    ("pytorch_model_fsdp_*", "an FSDP checkpoint", "Merge it: accelerate merge-weights"),
    ("*.distcp", "a torch.distributed checkpoint", "Merge it: accelerate merge-weights"),
    ("latest_checkpointed_iteration.txt", "a Megatron checkpoint", "Convert it to Hugging Face"),
    ("*.gguf", "a GGUF file", "Use the folder that it was converted from"),
    ("consolidated*", "weights in Meta's or Mistral's own layout", "Convert them to Hugging Face"),
    ("tf_model.h5", "weights of TensorFlow", _EXPORT),
    ("flax_model.msgpack", "weights of Flax", _EXPORT),
    ("*.safetensors", "safetensors files without an index", f"Add {INDEX_FILE}"),
    ("*.bin", "files of torch without an index", f"Add {_BIN_INDEX}"),
    ("tokenizer*", "a tokenizer", "Give the folder of its model"),
)
"""Pattern of a file -> what a folder without a model then is, and how a model comes of it."""


class Stored(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    """Its type, by the name that the file's format has for it."""

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point number of 16 bits or more."""
        return self.dtype in _FLOATS


def refused(folder: str, observed: str, expected: str, step: str) -> ValueError:
    """Return the error for a model folder that cannot be used."""
    return ValueError(
        f"the model folder cannot be used ({folder}): {observed}, expected {expected}. {step}"
    )


def read_config(folder: str) -> dict[str, Any]:
    """Return the entries of a model folder's config.json.

    Raises:
        ValueError: There is no such folder, it holds something else than a model, or its
            configuration is unusable or quantised.
    """
    _require_folder(folder)
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise refused(folder, *_without("no config.json", folder, "config.json and weights"))
    if os.path.isfile(os.path.join(folder, "adapter_config.json")):
        _, what, step = _FOREIGN[0]
        # With peft installed, transformers would load the adapter's base model from elsewhere.
        raise refused(folder, f"it holds {what} (adapter_config.json)", "a whole model", step)
    config = read_json(folder, "config.json")
    if not isinstance(config.get("model_type"), str):
        raise refused(
            folder,
            f"config.json has no model_type; it has {', '.join(sorted(config)[:8]) or 'nothing'}",
            "the config.json of a model",
            "Copy it from the model that the weights are of",
        )
    return config


def _require_folder(folder: str) -> None:
    if os.path.isdir(folder):
        return
    if os.path.isfile(folder):
        kind = "a GGUF file" if folder.endswith(".gguf") else "a file"
        raise refused(folder, f"it is {kind}", "a folder", f"Give {os.path.dirname(folder) or '.'}")
    step = "Give the full path of a folder that every worker can read"
    if folder.startswith("~"):
        step = f"Write the home folder in full: {os.path.expanduser(folder)}"
    elif folder.count("/") == 1 and not folder.startswith((".", "/")):
        step = f"For the model of the Hugging Face Hub: hf download {folder} --local-dir DIR"
    raise ValueError(
        f"there is no model folder {folder!r} on this worker: the path does not exist, expected a "
        f"local folder in the Hugging Face layout. {step}"
    )


def _without(lack: str, folder: str, expected: str) -> tuple[str, str, str]:
    """Describe a folder that lacks a part of a model, with the nearest way to one."""
    if below := next(_models_below(Path(folder)), None):
        return f"it has {lack}, but {below} is a model", expected, "Give that folder"
    for pattern, what, step in _FOREIGN:
        if found := next(Path(folder).glob(pattern), None):
            return f"it has {lack} and looks like {what} ({found.name})", expected, step
    return f"it has {lack}", expected, _EXPORT


def _models_below(folder: Path, depth: int = 2) -> Iterator[Path]:
    """Yield the folders below that have a configuration and weights."""
    for each in sorted(folder.iterdir() if depth else ()):
        if each.is_dir() and os.access(each, os.R_OK | os.X_OK):
            if (each / "config.json").is_file() and _weight_files(str(each)):
                yield each
            yield from _models_below(each, depth - 1)


def _weight_files(folder: str) -> str:
    """Return the file or index from which a folder's weights are read; '' if there is none."""
    # The order is that of transformers. vLLM and SGLang also prefer safetensors.
    names = (SINGLE_FILE, INDEX_FILE, _BIN_FILE, _BIN_INDEX)
    return next((name for name in names if os.path.isfile(os.path.join(folder, name))), "")


def read_headers(folder: str) -> dict[str, Stored]:
    """Return the tensors of a model folder by name, without reading their values.

    Raises:
        ValueError: There are no weights, a file is missing, damaged or the pointer of Git LFS, or
            programs would choose different files.
    """
    chosen = _weight_files(folder)
    if not chosen:
        raise refused(
            folder, *_without("no weights", folder, f"{SINGLE_FILE}, or {INDEX_FILE} and its files")
        )
    listed: Mapping[str, str] = {}
    if chosen.endswith(".index.json"):
        index = read_json(folder, chosen)
        listed = index.get("weight_map") or {}
        # transformers does not read an index without metadata.
        if not isinstance(listed, Mapping) or not listed or "metadata" not in index:
            raise refused(
                folder,
                f"{chosen} has {some(sorted(index)) or 'nothing'}",
                "a weight_map with the file of each tensor, and metadata (which may be {})",
                _EXPORT,
            )
    names = sorted(set(listed.values())) or [chosen]
    _require_one_choice(folder, chosen, names)
    if missing := [name for name in names if not os.path.exists(os.path.join(folder, name))]:
        raise refused(
            folder,
            f"{len(missing)} of {len(names)} weight files are missing: {some(missing)}",
            f"all files that {chosen} lists",
            "Download or copy them again",
        )
    stored: dict[str, Stored] = {}
    for name in names:
        stored |= _read_file(folder, name)
    if lost := [name for name in listed if name not in stored]:
        raise refused(
            folder,
            f"{len(lost)} tensors that {chosen} lists are missing from their files: {some(lost)}",
            "an index of these files",
            "Copy index and files from the same model",
        )
    return stored


def _require_one_choice(folder: str, chosen: str, names: Sequence[str]) -> None:
    """Refuse other safetensors files: vLLM reads all files, or those of the index first."""
    if not names[0].endswith(".safetensors"):
        return
    others = {path.name for path in Path(folder).glob("*.safetensors")} - {*names}
    if chosen == INDEX_FILE:
        others &= {SINGLE_FILE}
    others = {name for name in others if not name.startswith("consolidated")}
    if others:
        raise refused(
            folder,
            f"it has {chosen} and also {some(sorted(others))}, and programs differ in the choice",
            "the files of one model",
            "Remove the others",
        )


def _read_file(folder: str, name: str) -> dict[str, Stored]:
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        begin = file.read(len(_LFS_MARK))
    if begin == _LFS_MARK:
        raise refused(
            folder,
            f"{name} is the pointer of Git LFS, not the file itself",
            "weights",
            "Run 'git lfs pull' in the repository, or download the model with 'hf download'",
        )
    try:
        if name.endswith(".safetensors"):
            return _safetensors_header(path)
        return _torch_header(path)
    except OSError:
        raise
    except Exception as error:  # unpickling, in particular, raises arbitrary errors
        reason = " ".join(str(error).split())[:200]
        raise refused(
            folder,
            f"{name} ({os.path.getsize(path)} bytes) is damaged or incomplete: {reason}",
            "a file of tensors",
            "Download or copy it again",
        ) from error


def _safetensors_header(path: str) -> dict[str, Stored]:
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return {
            name: Stored(tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()
        }


def _torch_header(path: str) -> dict[str, Stored]:
    # Files of torch before 1.6 are no archives and cannot be mapped.
    how: dict[str, Any] = {"mmap": True} if zipfile.is_zipfile(path) else {"map_location": "meta"}
    tensors = torch.load(path, weights_only=True, **how)
    if other := [name for name, each in tensors.items() if not isinstance(each, torch.Tensor)]:
        raise SafetensorError(f"it has entries that are no tensors: {some(other)}")
    return {name: Stored(tuple(each.shape), str(each.dtype)) for name, each in tensors.items()}


def read_tensor(folder: str, name: str) -> torch.Tensor:
    """Return a tensor of a folder that read_headers has accepted; mapped, not copied."""
    chosen = _weight_files(folder)
    if chosen.endswith(".index.json"):
        chosen = read_json(folder, chosen)["weight_map"][name]
    path = os.path.join(folder, chosen)
    if not chosen.endswith(".safetensors"):
        tensor: torch.Tensor = torch.load(
            path, weights_only=True, mmap=zipfile.is_zipfile(path) or None
        )[name]
        return tensor
    with safe_open(path, framework="pt") as file:
        whole: torch.Tensor = file.get_tensor(name)
    return whole


def read_json(folder: str, name: str) -> dict[str, Any]:
    """Return the entries of a file of a folder.

    Raises:
        ValueError: There is no such file, or it has something else than an object of JSON.
    """
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            entries = json.load(file)
        if not isinstance(entries, dict):
            raise ValueError("it holds a list or a value")
    except (OSError, ValueError) as error:
        raise refused(
            folder,
            f"{name} cannot be read as JSON: {error}",
            "an object",
            "Give the folder's full path, or download or copy the file again",
        ) from error
    return entries


def some(names: Sequence[str], most: int = 4) -> str:
    """Join the first names."""
    return ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")
