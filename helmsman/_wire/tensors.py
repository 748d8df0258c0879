"""Tensors for the codec: converts ``torch.Tensor``, but no subclass, to raw bytes and back.

A tensor with dense elements, in any order, is sent from its own memory, with shape and strides.
Dimensions of stride 0 (``expand``) cost nothing. Views with gaps are copied compactly first. The
codec imports this module, and with it torch, when a value contains a tensor.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch  # noqa: TID253 - see above

from helmsman._wire.memory import bytes_type, without_write_check

# Flags beside dtype, shape and strides.
_CONJUGATED = 1
_NEGATED = 2
_REQUIRES_GRAD = 4

# Not every dtype has copy kernels (small integers have none), but the integer of its size does.
# Elements are only moved, so the type does not matter.
_MOVED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

Reduced = tuple[Callable[..., Any], tuple[Any, ...]] | tuple[Any, ...]


def reduce_tensor(tensor: torch.Tensor) -> Reduced | None:
    """Return pickle's instructions to rebuild a tensor; its elements are one ``PickleBuffer``.

    A tensor on an accelerator is copied to the host, and arrives there. A non-leaf arrives as a
    leaf, as in torch's own pickling.

    Returns:
        None for tensors that torch's own pickling must handle: sparse, quantized, nested and meta
        tensors, and those with backward hooks.
    """
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
        or tensor._backward_hooks
    ):
        return None
    shape, strides = tuple(tensor.shape), tensor.stride()
    flags = (
        (_CONJUGATED if tensor.is_conj() else 0)
        | (_NEGATED if tensor.is_neg() else 0)
        | (_REQUIRES_GRAD if tensor.requires_grad else 0)
    )
    num_elements = tensor.numel()
    data: pickle.PickleBuffer | None = None
    if num_elements:
        source = tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            source, num_elements, strides = _dense(tensor, shape, strides)
        data = pickle.PickleBuffer(_memory_of(source, num_elements * source.element_size()))
    arguments = (data, str(tensor.dtype)[len("torch.") :], shape, strides, flags)
    if tensor.__dict__:
        return rebuild_tensor, arguments, tensor.__dict__, None, None, _set_attributes
    return rebuild_tensor, arguments


def _dense(
    tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[torch.Tensor, int, tuple[int, ...]]:
    """Return a host tensor, the number of its leading elements to send, and the strides to read."""
    raw = tensor.detach()
    # Applying the involution again clears a lazily set bit; the bytes below it are sent.
    if raw.is_conj():
        raw = raw.conj()
    if raw.is_neg():
        raw = torch._neg_view(raw)
    raw = raw.view(_MOVED_AS[raw.element_size()])
    own_shape = tuple(
        1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)
    )
    num_own = functools.reduce(int.__mul__, own_shape, 1)
    span = 1 + sum((size - 1) * stride for size, stride in zip(own_shape, strides, strict=True))
    if span <= num_own:
        # Dense in some order, or overlapping windows: the memory span is no longer than the
        # elements.
        flat = raw.as_strided((span,), (1,))
        return flat.cpu(), span, strides
    compact = raw.as_strided(own_shape, strides).contiguous()
    own_strides = tuple(
        0 if old == 0 else new for old, new in zip(strides, compact.stride(), strict=True)
    )
    return compact.cpu(), num_own, own_strides


def _memory_of(tensor: torch.Tensor, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return the bytes from the tensor's first element on, without a copy.

    The result keeps the storage alive, and not only the tensor: ``tensor.data = other`` would free
    the tensor's memory.
    """
    array = bytes_type(num_bytes).from_address(tensor.data_ptr())
    array.storage = tensor.untyped_storage()  # type: ignore[attr-defined]
    return array


def rebuild_tensor(
    data: Any, dtype_name: str, shape: tuple[int, ...], strides: tuple[int, ...], flags: int
) -> torch.Tensor:
    """Rebuild a tensor from ``reduce_tensor``; it uses the memory of ``data``, kept alive by it."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    if data is None:
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
    else:
        flat = torch.frombuffer(without_write_check(data), dtype=dtype)
        if flat.data_ptr() % flat.element_size():
            flat = flat.clone()
        # .data makes an independent tensor: autograd treats a view of `flat` differently.
        tensor = flat.as_strided(shape, strides).data
    if flags:
        if flags & _CONJUGATED:
            tensor = tensor.conj().data
        if flags & _NEGATED:
            tensor = torch._neg_view(tensor).data
        if flags & _REQUIRES_GRAD:
            tensor.requires_grad_()
    return tensor


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)
