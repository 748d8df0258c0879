"""The folder of a checkpoint: written under a temporary name, renamed when complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

import msgspec
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from helmsman.engines._models.files import check_replaceable, copy_tokenizer
from helmsman.engines._models.heads import plain_config

PROGRESS_FILE = "helmsman.json"
STATE_FOLDER = "state"


class TrainProgress(msgspec.Struct, frozen=True):
    """Progress of training; with the configuration it determines the learning rate schedule."""

    version: int
    """Weight version."""
    num_steps: int
    """Optimizer steps taken."""


class Saved(msgspec.Struct, frozen=True):
    progress: TrainProgress
    num_ranks: int


def is_checkpoint(path: str) -> bool:
    return os.path.isfile(os.path.join(path, PROGRESS_FILE)) and os.path.isdir(
        os.path.join(path, STATE_FOLDER)
    )


def begin_folder(path: str, model: nn.Module, source: str | None, saved: Saved) -> str:
    """Create a folder beside ``path`` with everything but the state; return its name."""
    check_replaceable(path, PROGRESS_FILE)
    parent, name = os.path.split(path)
    os.makedirs(parent, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    try:
        os.chmod(unfinished, 0o755)
        plain_config(model).save_pretrained(unfinished)
        copy_tokenizer(source, unfinished)
        with open(os.path.join(unfinished, PROGRESS_FILE), "wb") as file:
            file.write(msgspec.json.encode(saved))
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            error.filename = error.filename or path  # the error of a write has no name
        raise
    return unfinished


def read_saved(path: str) -> Saved:
    """Read helmsman.json; raise ValueError if there is no complete checkpoint."""
    progress_path = os.path.join(path, PROGRESS_FILE)
    if not os.path.isfile(progress_path):
        raise ValueError(f"{path!r} is not a checkpoint of this engine: it has no {PROGRESS_FILE}")
    if not os.path.isfile(os.path.join(path, STATE_FOLDER, ".metadata")):
        raise ValueError(
            f"{path!r} is an incomplete checkpoint: it has no {STATE_FOLDER}/.metadata"
        )
    with open(progress_path, "rb") as file, _readable(progress_path):
        return msgspec.json.decode(file.read(), type=Saved)


def read_contents(path: str) -> tuple[dcp.FileSystemReader, dict[str, TensorStorageMetadata]]:
    """Return a reader of a checkpoint's state, and the metadata of its tensors by name.

    Raises:
        ValueError: A file is missing or truncated.
    """
    folder = os.path.join(path, STATE_FOLDER)
    reader = dcp.FileSystemReader(folder)
    with _readable(os.path.join(folder, ".metadata")):
        metadata = reader.read_metadata()
    if problem := missing_part(folder, metadata):
        raise ValueError(f"{path!r} is an incomplete checkpoint: {problem}")
    found = {
        name: each
        for name, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    return reader, found


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Convert decoding errors of a file to ValueError; OSError is passed on."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # decoders, pickle in particular, raise arbitrary errors
        raise ValueError(
            f"{path!r} is damaged, possibly by a crash of its host: {type(error).__name__}: "
            f"{error}. Load another checkpoint"
        ) from error


def missing_part(folder: str, metadata: Metadata) -> str:
    """Describe the first missing or truncated file; '' if all are complete."""
    sizes: dict[str, int] = {}
    for each in (metadata.storage_data or {}).values():
        sizes[each.relative_path] = max(sizes.get(each.relative_path, 0), each.offset + each.length)
    for name, size in sizes.items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            return f"it has no {STATE_FOLDER}/{name}"
        if os.path.getsize(path) < size:
            return f"{STATE_FOLDER}/{name} has {os.path.getsize(path)} of {size} bytes"
    return ""


class Writer(dcp.FileSystemWriter):
    """A file writer that raises the OSError of a failed write.

    When a file cannot be written, torch's archive fails again while it is closed, and its
    RuntimeError hides the cause.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error.__context__
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror) from error
            raise


@contextlib.contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Convert torch's CheckpointException of several ranks to an error of the first failed rank.

    CheckpointException is not an Exception. Raises OSError or RuntimeError.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        kind = OSError if isinstance(first, OSError) else RuntimeError
        raise kind(f"{what} failed on rank {rank}: {type(first).__name__}: {first}") from first
