"""Checkpoints of a sharded training state. Every rank writes its part, all or nothing.

    <path>/helmsman.json     progress of training, and the number of ranks
    <path>/config.json       the model's configuration; the tokenizer's files if the model came
                             from a folder
    <path>/state/            torch.distributed.checkpoint: parameters and optimizer state by name,
                             each rank's random state

Tensors are saved by their position in the full tensor, which their DTensor records, so any number
of ranks and any mesh can read the parts that they need. The folder gets its final name when it is
complete. hf_export.py exports weights for other programs.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import warnings
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from helmsman.engines._models.checkpoint_files import (
    STATE_FOLDER,
    Saved,
    TrainProgress,
    Writer,
    begin_folder,
    missing_part,
    plain_errors,
    read_contents,
    read_saved,
)
from helmsman.engines._models.distributed import failing_together, gather_objects, named_tensors
from helmsman.engines._models.files import replace_folder
from helmsman.engines._models.gloo_listeners import closed_afterwards
from helmsman.engines._models.heads import check_saved_head, head_of

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads the state of a training job.

    This includes the random state of ``device`` and the host. Every method but ``close`` is called
    on all ranks; they wait ``timeout_s`` seconds for each other.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._group: Any = None
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        """Error of the last background save, on rank 0, until it is raised."""

    def save(
        self,
        path: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: TrainProgress,
        source: str | None = None,
        *,
        background: bool = False,
    ) -> None:
        """Write a checkpoint to a folder that all ranks can write to. A collective.

        An existing checkpoint there is replaced once this one is complete. The tokenizer is copied
        from ``source``, the folder that the model came from. With ``background``, the call returns
        once the state has been copied to the host, and later failures are raised by the next save,
        load or wait.

        Raises:
            OSError: This rank cannot write there, or the path holds something else than a
                checkpoint.
            RuntimeError: Another rank failed.
        """
        self.wait()
        path = os.path.abspath(path)
        is_root = dist.get_rank() == 0
        unfinished = ""
        with failing_together(f"saving to {path}"):
            if is_root:
                unfinished = begin_folder(
                    path, model, source, Saved(progress, dist.get_world_size())
                )
        unfinished = gather_objects(unfinished)[0]
        state = {**_tensors(model, optimizer), **self._random_state()}
        self._join_group()
        if background:
            try:
                with failing_together(f"copying the state for {path}"):
                    state = {name: _staged(tensor) for name, tensor in state.items()}
            except BaseException:
                if is_root:
                    shutil.rmtree(unfinished, ignore_errors=True)
                raise
            writing = threading.Thread(
                target=self._write_and_note,
                args=(state, unfinished, path, is_root),
                name="helmsman-checkpoint",
            )
            writing.start()
            self._writing = writing
            return
        with failing_together(f"saving to {path}"):
            self._write(state, unfinished, path, is_root)

    def _write_and_note(
        self, state: Mapping[str, torch.Tensor], unfinished: str, path: str, is_root: bool
    ) -> None:
        try:
            self._write(state, unfinished, path, is_root)
        except Exception as error:
            logger.exception("writing the checkpoint %s failed", path)
            if is_root:
                self._failure = error

    def _write(
        self, state: Mapping[str, torch.Tensor], unfinished: str, path: str, is_root: bool
    ) -> None:
        folder = os.path.join(unfinished, STATE_FOLDER)
        try:
            with plain_errors(f"writing to {path}"):
                metadata = dcp.save(
                    dict(state), storage_writer=Writer(folder), process_group=self._group
                )
            if is_root:
                if problem := missing_part(folder, metadata):
                    raise OSError(
                        f"{problem}, which another rank has written; {path} must be on a file "
                        "system that all ranks share"
                    )
                replace_folder(unfinished, path)
        finally:
            if is_root:
                shutil.rmtree(unfinished, ignore_errors=True)

    def wait(self) -> None:
        """Wait for the background save and raise its error, if any. A collective."""
        self._join_writing()
        with failing_together("the last save in the background"):
            self.raise_failure()

    def _join_writing(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def raise_failure(self) -> None:
        """Raise the error of a background save, once.

        Only rank 0 raises it, so call this inside a failing_together block.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the background save, and leave the writers' group. Idempotent."""
        self._join_writing()
        if self._failure is not None:
            logger.error(
                "the last checkpoint was not saved, and no call has raised its error: %s",
                self._failure,
            )
            self._failure = None
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _join_group(self) -> None:
        """Create a separate group, to keep background writes apart from training's collectives."""
        if self._group is None:
            with closed_afterwards():
                self._group = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=self._timeout_s)
                )

    def load(self, path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainProgress:
        """Read a checkpoint into a model and an optimizer that has not stepped. A collective.

        Raises:
            ValueError: There is no complete checkpoint, or it is one of another model; nothing has
                changed.
            RuntimeError: Reading failed half-way, and the model has some of the checkpoint's
                parameters. Or another rank failed.
        """
        self.wait()
        with failing_together(f"loading {path}"):
            saved = read_saved(path)
            check_saved_head(path, head_of(model), exact=True)
            reader, found = read_contents(path)
            _check_shapes(path, _model_tensors(model), found)
            states = _empty_states(model, found)
        self._join_group()
        random = self._random_state() if saved.num_ranks == dist.get_world_size() else {}
        # A checkpoint from another kind of device has no random state for this one.
        random = {
            name: tensor
            for name, tensor in random.items()
            if name in found and found[name].size == tensor.shape
        }
        state = {
            **_model_tensors(model),
            **{name: tensor for _, _, name, tensor in states},
            **random,
        }
        with plain_errors(f"loading {path}"):
            dcp.load(state, storage_reader=reader, process_group=self._group)
        for parameter, key, _, tensor in states:
            optimizer.state[parameter][key] = tensor
        self._set_random_state(random)
        return saved.progress

    def _random_state(self) -> dict[str, torch.Tensor]:
        state = {f"random.{dist.get_rank()}.host": torch.get_rng_state()}
        if self._device.type != "cpu":
            state[f"random.{dist.get_rank()}.device"] = torch.get_device_module(
                self._device
            ).get_rng_state()
        return state

    def _set_random_state(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            if name.endswith(".host"):
                torch.set_rng_state(tensor)
            else:
                torch.get_device_module(self._device).set_rng_state(tensor)


def read_parameters(path: str, model: nn.Module, names: Collection[str] | None = None) -> None:
    """Read the parameters of a checkpoint into an unsharded model, in one process.

    Only those of these ``names`` are read, or all.

    Raises:
        ValueError: There is no complete checkpoint, or it is one of another model.
    """
    read_saved(path)
    reader, found = read_contents(path)
    tensors = {
        f"model.{name}": tensor.detach()
        for name, tensor in named_tensors(model).items()
        if names is None or name in names
    }
    _check_shapes(path, tensors, found)
    with plain_errors(f"reading {path}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that training changes: all, or the adapters of a frozen model."""
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    has_adapters = len(trained) < sum(1 for _ in model.parameters())
    return {
        f"model.{name}": tensor.detach()
        for name, tensor in named_tensors(model).items()
        if id(tensor) in trained or not has_adapters
    }


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors of model and optimizer by name; a new optimizer has none."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    tensors = _model_tensors(model)
    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            tensors[f"optimizer.{names[id(parameter)]}.{key}"] = value.detach()
    return tensors


def _empty_states(
    model: nn.Module, found: Mapping[str, TensorStorageMetadata]
) -> list[tuple[torch.Tensor, str, str, torch.Tensor]]:
    """Allocate the optimizer's tensors that a checkpoint has.

    Returns (parameter, key, name in the checkpoint, tensor to read into) for each.
    """
    states: list[tuple[torch.Tensor, str, str, torch.Tensor]] = []
    parameters = named_tensors(model)
    for name, each in found.items():
        kind, _, rest = name.partition(".")
        if kind != "optimizer":
            continue
        parameter_name, _, key = rest.rpartition(".")
        parameter = parameters[parameter_name]
        if each.size == parameter.shape:  # sharded as the parameter is
            tensor = torch.zeros_like(parameter.detach(), dtype=each.properties.dtype)
        else:
            tensor = torch.zeros(each.size, dtype=each.properties.dtype)
        states.append((parameter, key, name, tensor))
    return states


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local = tensor.to_local().to("cpu", copy=True)
        # DTensor.from_local would move it to the mesh's device again.
        return DTensor(local, tensor._spec, requires_grad=False)
    return tensor.to("cpu", copy=True)


def _check_shapes(
    path: str, tensors: Mapping[str, torch.Tensor], found: Mapping[str, TensorStorageMetadata]
) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    other = {name: tuple(each.size) for name, each in found.items() if name.startswith("model.")}
    if other and all(".lora_" in name for name in other) and own.keys().isdisjoint(other):
        raise ValueError(
            f"{path!r} holds the adapters of a model without the model itself. Give the exported "
            "model of that run, or its base model with lora.path, the exported adapter"
        )
    if own != other:
        names = sorted(
            name for name in own.keys() | other.keys() if own.get(name) != other.get(name)
        )
        shown = ", ".join(
            f"{name} {own.get(name)} here, {other.get(name)} there" for name in names[:4]
        )
        raise ValueError(
            f"{path!r} holds another model; {len(names)} of its parameters differ: {shown}"
        )
