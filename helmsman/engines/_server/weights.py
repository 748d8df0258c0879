"""Conversion of incoming weights to a folder of safetensors, which an inference server can read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from helmsman.api.weights import Weights, WeightsOnDisk
from helmsman.engines._models.adapter_files import (
    is_adapter_in_files,
    rank_in_files,
    write_received,
)
from helmsman.engines._models.files import INDEX_FILE, FolderWriter
from helmsman.engines._models.folders import read_config
from helmsman.engines._weights.fit import Expected, expected_of, require_fit
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines._weights.model_folder import check_model_folder
from helmsman.engines.weight_transfer import incoming

log = logging.getLogger(__name__)

_OTHER_WEIGHTS = ("--load-format", "--quantization", "-q")
"""Arguments with which a server loads other weights than the plain ones of its folder."""


def forms_of(folder: str, args: Sequence[str] = ()) -> list[Expected]:
    """Return the expected names and shapes of a model's weights.

    Args:
        folder: Folder in the Hugging Face layout.
        args: Arguments of the server, by which it may load other weights than those of the folder.

    Returns:
        The forms; none where they cannot be determined, for example for a model with its own code.

    Raises:
        ValueError: The folder does not exist, or its files are not those of its model.
    """
    names = {arg.partition("=")[0].replace("_", "-") for arg in args}
    if names.isdisjoint(_OTHER_WEIGHTS):
        check_model_folder(folder)
    else:
        read_config(folder)
    try:
        return expected_of(folder)
    except ValueError as error:
        log.warning("weights for %s are loaded without checking that they fit: %s", folder, error)
        return []


def has_random_weights(args: Sequence[str]) -> bool:
    """Return whether a server with these arguments starts with random weights."""
    return re.search(r"--load[-_]format[= ]dummy\b", " ".join(args)) is not None


def warn_without_room(folder: str, exchange_folder: str) -> None:
    """Log a warning if the weights of a model's folder would not fit into the exchange folder.

    It is no error, since weights that arrive as files are not copied.
    """
    num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    free = shutil.disk_usage(exchange_folder).free
    if num_bytes > free:
        log.warning(
            "%s has %d bytes free, and the weights of %s take %d: weights that do not arrive as "
            "files will not fit. Enlarge it (docker --shm-size, an emptyDir with medium Memory), "
            "or set ServerConfig.exchange_folder to a folder with room for them",
            exchange_folder,
            free,
            folder,
            num_bytes,
        )


_FOLDER = "helmsman-weights."


def make_exchange(parent: str) -> tuple[str, int]:
    """Create a private folder of this process below ``parent``; return its path and its lock.

    The lock is a descriptor and ends with the process. Folders whose process has exited are
    removed: when a worker is killed, its guardian may kill the server's guard too, before the guard
    removes the folder.
    """
    for name in os.listdir(parent):
        if name.startswith(_FOLDER):
            with contextlib.suppress(OSError):
                # Still locked, owned by another user, or already removed.
                _remove_abandoned(os.path.join(parent, name))
    unlocked = tempfile.mkdtemp(prefix=f".{_FOLDER}", dir=parent)
    lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path = os.path.join(parent, os.path.basename(unlocked)[1:])
    os.rename(unlocked, path)  # from here on other processes consider it for removal
    return path, lock


def _remove_abandoned(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(folder).st_uid == os.getuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)


@contextlib.contextmanager
def as_folder(
    weights: Weights,
    group: WeightGroup,
    forms: Sequence[Expected],
    exchange_folder: str,
    max_lora_rank: int,
) -> Iterator[tuple[str, bool]]:
    """Provide weights from any source as a folder that the server can read during the block.

    Servers load the tensors that they find and ignore missing ones, so names and shapes are checked
    here.

    Args:
        weights: The weights, or their location.
        group: This process's membership in weight-sync groups.
        forms: Accepted names and shapes; empty accepts all.
        exchange_folder: Folder in which files are written if the weights are not files yet.
        max_lora_rank: Largest rank of an adapter; 0 for none.

    Yields:
        The path of the folder, and whether it has an adapter in the form of PEFT.

    Raises:
        ValueError: The weights do not fit the model, an adapter's rank is too large, or a checksum
            does not match.
        ConnectionError: A member of the weight-sync group is missing or late.
        OSError: Files cannot be read or written.
    """
    with incoming(weights, group) as arriving:
        is_adapter = is_adapter_in_files(arriving.shapes)
        if is_adapter:
            _require_rank(rank_in_files(arriving.shapes), max_lora_rank)
        elif forms:
            require_fit(forms, arriving.shapes)
        if isinstance(weights, WeightsOnDisk) and not is_adapter:
            if _has_checksums(weights.path):
                for _ in arriving:
                    pass  # reading verifies the checksums
            yield weights.path, False
            return
        path = tempfile.mkdtemp(prefix="weights.", dir=exchange_folder)
        try:
            if is_adapter:
                write_received(path, arriving)
            else:
                write_folder(arriving, path)
            yield path, is_adapter
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _require_rank(rank: int, max_lora_rank: int) -> None:
    if rank > max_lora_rank:
        raise ValueError(
            f"an adapter of rank {rank} arrived, and ServerConfig.max_lora_rank is "
            f"{max_lora_rank or '0, for none'}; expected {rank} or more. Set it, or send the whole "
            "model (WeightFormat.adapters False)"
        )


def _has_checksums(path: str) -> bool:
    with open(os.path.join(path, INDEX_FILE), "rb") as file:
        return bool(json.load(file)["metadata"].get("crc32"))


def write_folder(buckets: Iterable[Mapping[str, torch.Tensor]], path: str) -> None:
    """Write tensors by name as safetensors files with an index, in the Hugging Face layout.

    Raises:
        OSError: The folder has no room.
    """
    writer = FolderWriter(path)
    for bucket in buckets:
        try:
            writer.write(bucket)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no room for {sum(tensor.nbytes for tensor in bucket.values())} more bytes of "
                f"weights, after {writer.num_bytes}, in {path}: {error}. Free space, or set "
                "ServerConfig.exchange_folder to a folder with room for all of them",
            ) from error
    writer.finish()
