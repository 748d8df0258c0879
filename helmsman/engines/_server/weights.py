"""Weights as an inference server takes them, whichever way they come: a folder of safetensors that
it reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from helmsman.api.weights import Weights, WeightsOnDisk
from helmsman.engines._models.files import INDEX_FILE, FolderWriter
from helmsman.engines._weights.fit import Expected, expected_of, require_fit
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.weight_transfer import incoming

log = logging.getLogger(__name__)


def forms_of(folder: str) -> list[Expected]:
    """What weights of a folder's model look like; nothing where that cannot be told, as with code
    of the model's own.
    """
    try:
        return expected_of(folder)
    except ValueError as error:
        log.warning("weights for %s are loaded without a look whether they fit: %s", folder, error)
        return []


_FOLDER = "helmsman-weights."


def make_exchange(parent: str) -> tuple[str, int]:
    """A folder of this process's own below ``parent``, and the descriptor of its lock, which ends
    with the process.

    Folders whose process has gone are removed: where a worker is killed, its guardian may kill the
        server's guard, too.
    """
    for name in os.listdir(parent):
        if name.startswith(_FOLDER):
            with contextlib.suppress(OSError):
                # its process lives, it is somebody else's, or another has removed it
                _remove_abandoned(os.path.join(parent, name))
    unlocked = tempfile.mkdtemp(prefix=f".{_FOLDER}", dir=parent)
    lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path = os.path.join(parent, os.path.basename(unlocked)[1:])
    os.rename(unlocked, path)  # from here on others see it
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
    weights: Weights, group: WeightGroup, forms: Sequence[Expected], exchange_folder: str
) -> Iterator[str]:
    """Weights, however they come, as a folder for the server to read; it is there until the end.
    Servers take what they find, and go on without the rest, so names and shapes are compared
    before.

    Raises: ValueError where they do not fit the model, or are not those that were sent;
        ConnectionError; OSError.
    """
    with incoming(weights, group) as arriving:
        if forms:
            require_fit(forms, arriving.shapes)
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
    with open(os.path.join(path, INDEX_FILE), "rb") as file:
        return bool(json.load(file)["metadata"].get("crc32"))


def write_folder(buckets: Iterable[Mapping[str, torch.Tensor]], path: str) -> None:
    """Write tensors by name as files with an index, as Hugging Face has them. Raises: OSError where
    there is no room.
    """
    writer = FolderWriter(path)
    for bucket in buckets:
        try:
            writer.write(bucket)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no room for {sum(tensor.nbytes for tensor in bucket.values())} bytes of weights "
                "more, after "
                f"{writer.num_bytes}, in {path}: {error}. Free some, or set "
                "ServerConfig.exchange_folder to a folder with room "
                "for all of them",
            ) from error
    writer.finish()
