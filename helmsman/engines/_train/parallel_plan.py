"""Tensor parallelism of a ``transformers`` model, by the plan that the model declares.

Megatron-LM, arXiv:1909.08053: the matrices of a layer are split by columns, then by rows, so that
each rank computes some heads and some hidden units, and one sum over the ranks ends each half of
the layer. A transformers model declares the split of each matrix (``base_model_tp_plan`` of its
configuration, ``_tp_plan`` of its class); no model is listed by name here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from helmsman.api.errors import ParallelLayoutError
from helmsman.engines._models.adapter_layers import PARTS

_COLUMN_STYLES = {"colwise", "colwise_gather_output", "colwise_rep"}
_ROW_STYLES = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_EMBEDDING_STYLES = {"embedding_rowwise"}
_NORM_STYLES = {"replicated_with_grad_allreduce"}


class TensorPlan:
    """Split of each module of a model over ``size`` tensor-parallel ranks.

    Raises:
        ValueError: The model declares no plan, or an unsupported one.
        ParallelLayoutError: ``size`` does not divide a size of the model.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        config: Any = model.config
        self._name = f"{type(model).__name__} ({config.model_type})"
        declared: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
        if not any(style in _COLUMN_STYLES for style in declared.values()):
            raise ValueError(
                f"tensor_parallel_size is {size}, and {self._name} declares no plan for it in "
                "transformers. Set tensor_parallel_size to 1; FSDP and context parallelism need "
                "no plan"
            )
        self._styles = {
            name: style
            for name, module in model.named_modules()
            if (style := _declared(declared, name))
        }
        self._choose_vocabulary(model)
        self._check(model, config.get_text_config(), size)
        self.has_sharded_logits = self._styles.get(self._output_name) in _COLUMN_STYLES
        """Whether each rank's logits cover only its part of the vocabulary."""

    def apply(
        self, module: nn.Module, name: str, mesh: DeviceMesh, but_for: Sequence[nn.Module] = ()
    ) -> None:
        """Split the matrices of a module, except those inside of the modules ``but_for``.

        ``name`` is the module's name in the model; modules in ``but_for`` have been split before.
        """
        others = {id(inner) for other in but_for for inner in other.modules()}
        # Each style replaces the parameter, so tied parameters are tied again below.
        tied = self._is_tied and not name
        for inner_name, inner in list(module.named_modules(prefix=name)):
            if id(inner) in others:
                continue
            if self._has_one_input(inner_name, inner):
                _replicate_input(inner, mesh)
            if inner_name in self._styles:
                # All ranks have built the same weights, so nothing needs to be sent.
                parallelize_module(inner, mesh, self._style(inner_name), src_data_rank=None)
                if hasattr(inner, PARTS[0]):
                    _split_adapter(inner, mesh, is_row=self._styles[inner_name] in _ROW_STYLES)
                if isinstance(inner, nn.Embedding):
                    _keep_padding_fixed(inner)
        if tied and self._embedding_name in self._styles:
            output, embeddings = (
                module.get_submodule(each) for each in (self._output_name, self._embedding_name)
            )
            output.weight = embeddings.weight

    def _has_one_input(self, name: str, module: nn.Module) -> bool:
        """Return whether a module's input goes only to several column-parallel matrices."""
        children = [
            (f"{name}.{child}", inner)
            for child, inner in module.named_children()
            if _has_parameters(inner)
        ]
        columns = [child for child, _ in children if self._styles.get(child) == "colwise"]
        has_own = next(module.parameters(recurse=False), None) is not None
        return (
            len(columns) > 1 and not has_own and all(child in self._styles for child, _ in children)
        )

    def _style(self, name: str) -> ParallelStyle:
        style = self._styles[name]
        if style in _EMBEDDING_STYLES:
            return RowwiseParallel(input_layouts=Replicate())
        if style in _ROW_STYLES:
            return RowwiseParallel(input_layouts=Shard(-1) if style == "rowwise" else Replicate())
        if style in _NORM_STYLES:
            # Each rank normalises its own heads, so the gradients of the norm's weights must be
            # summed over ranks. SequenceParallel does that; the axis makes no difference here.
            return SequenceParallel(sequence_dim=1, use_local_output=True)
        if name == self._output_name:
            # Keep a DTensor, since FSDP warns about a model that returns a view.
            return ColwiseParallel(use_local_output=False)
        return ColwiseParallel(output_layouts=Shard(-1) if style == "colwise" else Replicate())

    def _choose_vocabulary(self, model: nn.Module) -> None:
        """Split the embeddings like the logits; keep both whole for a special embedding class.

        A subclass of nn.Embedding may do more than a look-up.
        """
        embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
        self._embedding_name = _name_of(model, embeddings)
        self._output_name = _name_of(model, output)
        self._is_tied = output is not None and output.weight is embeddings.weight
        if (
            type(embeddings) is nn.Embedding
            and self._styles.get(self._output_name) in _COLUMN_STYLES
        ):
            self._styles[self._embedding_name] = "embedding_rowwise"
            return
        self._styles.pop(self._embedding_name, None)
        if self._is_tied:
            self._styles.pop(self._output_name, None)

    def _check(self, model: nn.Module, config: Any, size: int) -> None:
        known = _COLUMN_STYLES | _ROW_STYLES | _EMBEDDING_STYLES | _NORM_STYLES
        unknown = sorted(
            {f"{style!r} at {name}" for name, style in self._styles.items() if style not in known}
        )
        odd = [
            name
            for name in self._styles
            if not isinstance(model.get_submodule(name), (nn.Linear, nn.Embedding))
        ]
        odd = [name for name in odd if self._styles[name] not in _NORM_STYLES]
        if unknown or odd:
            found = unknown or [
                f"{self._styles[name]!r} at {name}, a {type(model.get_submodule(name)).__name__}"
                for name in odd
            ]
            raise ValueError(
                f"tensor_parallel_size is {size}, but the plan of {self._name} has styles that are "
                f"not supported: {', '.join(found[:4])}. Set tensor_parallel_size to 1"
            )
        self._check_heads(config, size)
        for name, style in self._styles.items():
            if style in _NORM_STYLES:
                continue
            dim = 1 if style in _ROW_STYLES else 0
            length = int(model.get_parameter(f"{name}.weight").shape[dim])
            if length % size:
                is_vocabulary = name in (self._embedding_name, self._output_name)
                what = (
                    "the vocabulary size,"
                    if is_vocabulary
                    else f"the number of {'columns' if dim else 'rows'} of {name},"
                )
                raise self._uneven(size, f"{what} {length}", length)

    def _check_heads(self, config: Any, size: int) -> None:
        for field in ("num_attention_heads", "num_key_value_heads"):
            number = getattr(config, field, None)
            if number is not None and number % size:
                raise self._uneven(size, f"{field}, {number}", number)

    def _uneven(self, size: int, observed: str, number: int) -> ParallelLayoutError:
        valid = [other for other in range(1, size) if number % other == 0]
        return ParallelLayoutError(
            what=f"tensor_parallel_size of {self._name}",
            requested=size,
            observed=f"it does not divide {observed}",
            step=f"Set tensor_parallel_size to {' or '.join(map(str, valid))}",
        )


def _declared(plan: Mapping[str, str], name: str) -> str | None:
    return next(
        (style for pattern, style in plan.items() if re.fullmatch(_as_expression(pattern), name)),
        None,
    )


def _as_expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"\d+")


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str:
    return next((name for name, module in model.named_modules() if module is wanted), "")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _replicate_input(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the input of several matrices a DTensor, so that its gradient is summed over ranks once.

    Otherwise it would be summed once for each matrix.
    """

    def replicate(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (
                DTensor.from_local(args[0], mesh, [Replicate()], run_check=False),
                *args[1:],
            ), kwargs
        if "hidden_states" in kwargs:
            states = DTensor.from_local(
                kwargs["hidden_states"], mesh, [Replicate()], run_check=False
            )
            return args, {**kwargs, "hidden_states": states}
        return args, kwargs

    module.register_forward_pre_hook(replicate, with_kwargs=True)


def _split_adapter(layer: nn.Module, mesh: DeviceMesh, *, is_row: bool) -> None:
    """Split B by the outputs of its layer, or A by its inputs; the other one is small."""
    places = (Shard(1), Replicate()) if is_row else (Replicate(), Shard(0))
    for part, place in zip(PARTS, places, strict=True):
        like = getattr(layer, part)  # its values come after all splits
        empty = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        split = distribute_tensor(empty, mesh, [place], src_data_rank=None)
        layer.register_parameter(part, nn.Parameter(split))


def _keep_padding_fixed(embedding: nn.Embedding) -> None:
    """Give the padding token's embedding no gradient, as in an unsharded embedding.

    A shard would apply ``padding_idx`` to another token's row.
    """
    padding, embedding.padding_idx = embedding.padding_idx, None
    if padding is None:
        return

    def detach_padding(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        ids = args[0].to_local() if hasattr(args[0], "to_local") else args[0]
        return output.detach().where((ids == padding)[..., None], output)

    embedding.register_forward_hook(detach_padding)
