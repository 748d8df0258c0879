"""Tests that the codec returns tensors as they were sent, by few bytes and copies."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman._wire.codec import Payload, decode, encode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that complex32 is experimental
    torch.empty(1, dtype=torch.complex32)

# All dtypes of this torch but the quantized ones, which torch's own pickling handles.
DTYPES = sorted(
    {
        each
        for each in vars(torch).values()
        if isinstance(each, torch.dtype) and not str(each).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(1, 2, 0),
    "gappy": lambda t: t[:, :, ::2],
    "gappy and permuted": lambda t: t.permute(2, 0, 1)[1:, :, :3],
    "offset": lambda t: t[2:],
    "row": lambda t: t[1, 2],
    "expanded": lambda t: t[:1].expand(7, -1, -1),
    "expanded and gappy": lambda t: t[:, :1, ::3].expand(-1, 7, -1),
    "windows": lambda t: t.flatten().unfold(0, 4, 1),
    "0-d": lambda t: t[0, 0, 0],
    "empty": lambda t: t[:, :0],
    "one element": lambda t: t[:1, :1, :1],
}


def round_trip(value: Any, **options: Any) -> Any:
    return decode(encode(value, **options))


def raw(tensor: torch.Tensor) -> bytes:
    """The elements as bytes, for dtypes that cannot be compared."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    as_integer = {
        1: torch.uint8,
        2: torch.int16,
        4: torch.int32,
        8: torch.int64,
        16: torch.complex128,
    }[tensor.element_size()]
    return tensor.view(as_integer).numpy().tobytes()


def random_tensor(
    dtype: torch.dtype, seed: int = 0, shape: tuple[int, ...] = (4, 5, 6)
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, high, size, dtype=torch.uint8, generator=generator).view(dtype)


def assert_same(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(got) is type(sent)
    assert (got.dtype, got.shape, got.requires_grad) == (sent.dtype, sent.shape, sent.requires_grad)
    assert (got.is_conj(), got.is_neg()) == (sent.is_conj(), sent.is_neg())
    assert raw(got) == raw(sent)


@pytest.mark.parametrize("inband_below", [0, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_tensors_of_every_dtype_and_layout(dtype: torch.dtype, inband_below: int) -> None:
    for layout, make in LAYOUTS.items():
        sent = make(random_tensor(dtype))
        got = round_trip(sent, inband_below=inband_below)
        assert_same(got, sent)
        if "gappy" not in layout:
            assert got.stride() == sent.stride(), layout
        assert not got._is_view()


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = random_tensor(draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)), (*shape, 6))
    for _ in range(draw(st.integers(0, 3))):
        if tensor.dim():
            dim = draw(st.integers(0, tensor.dim() - 1))
            start = draw(st.integers(0, tensor.shape[dim]))
            step = draw(st.integers(1, 3))
            tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        if draw(st.booleans()):
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 4)), *tensor.shape)
    return tensor


@settings(max_examples=120)
@given(views(), st.sampled_from([0, 64, 4096]))
def test_encode_views_send_only_own_elements(sent: torch.Tensor, inband_below: int) -> None:
    payload = encode(sent, inband_below=inband_below)
    assert sum(each.nbytes for each in payload.buffers) <= sent.numel() * sent.element_size()
    assert_same(decode(payload), sent)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.conj(),
        lambda t: t.conj().imag,
        lambda t: t.t().conj(),
        lambda t: t.conj().imag[:, ::2],
    ],
)
def test_decode_lazy_conjugation_and_negation(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sent = make(torch.randn(20, 30, dtype=torch.complex64))
    got = round_trip(sent)
    assert_same(got, sent)
    assert torch.equal(got, sent)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t.view(8, 8, 32, 32).to(memory_format=torch.channels_last),
        lambda t: t[64:],
        lambda t: torch.nn.Parameter(t),
        lambda t: t.requires_grad_(),
    ],
    ids=["contiguous", "transposed", "channels_last", "rows", "parameter", "requires_grad"],
)
def test_encode_dense_tensors_without_copy(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sent = make(torch.randn(256, 256))
    (buffer,) = encode(sent).buffers
    assert np.frombuffer(buffer, np.uint8).ctypes.data == sent.data_ptr()
    assert buffer.nbytes == sent.numel() * 4
    assert buffer.readonly


def test_encode_slices_send_own_bytes() -> None:
    storage = torch.zeros(1000, 1000)
    for view, num_elements in (
        (storage[5:7], 2000),
        (storage[:, 3:5], 2000),
        (storage[:1].expand(1000, 1000), 1000),
    ):
        payload = encode(view, inband_below=0)
        assert [each.nbytes for each in payload.buffers] == [4 * num_elements]
        assert payload.nbytes < 4 * num_elements + 300
        assert torch.equal(decode(payload), view)


def test_payload_keeps_memory_alive() -> None:
    tensor = torch.full((5000,), 7.0)
    payload = encode(tensor)
    tensor.data = torch.zeros(1)  # as when a parameter is offloaded while its value is in flight
    del tensor
    gc.collect()
    torch.full((5000,), 9.0)
    assert torch.equal(decode(payload), torch.full((5000,), 7.0))


def test_payload_frees_memory() -> None:
    tensor = torch.zeros(5000)
    reference = weakref.ref(tensor)
    payload = encode([tensor])
    got = decode(payload)
    del tensor, payload, got
    gc.collect()
    assert reference() is None


def test_decode_tensors_private_and_writable() -> None:
    sent = [torch.zeros(5000), torch.zeros(3)]
    for got in round_trip(sent):
        got.add_(1)
    assert not any(each.any() for each in sent)


def test_decode_unaligned_buffers() -> None:
    payload = encode(torch.arange(1000, dtype=torch.float64))
    shifted = memoryview(bytearray(b"\0" + bytes(payload.buffers[0])))[1:]
    got = decode(Payload(payload.data, [shifted], []))
    assert got.data_ptr() % 8 == 0
    assert torch.equal(got, torch.arange(1000, dtype=torch.float64))


def test_decode_tensor_identity() -> None:
    tensor = torch.zeros(2000)
    first, second, view = round_trip([tensor, tensor, tensor[:1500]])
    assert first is second
    first.add_(1)
    assert not view.any()


def test_decode_parameters_modules_and_attributes() -> None:
    layer = torch.nn.Linear(50, 60)
    got = round_trip(layer)
    assert type(got.weight) is torch.nn.Parameter
    assert torch.equal(got.weight, layer.weight)
    frozen = round_trip(torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    assert not frozen.requires_grad
    leaf = round_trip(torch.zeros(3, requires_grad=True) * 2)
    assert leaf.is_leaf
    assert leaf.requires_grad
    (leaf.sum() * 3).backward()
    assert torch.equal(leaf.grad, torch.full((3,), 3.0))
    tagged = torch.zeros(3)
    tagged.tensor_model_parallel = True  # type: ignore[attr-defined]
    assert round_trip(tagged).tensor_model_parallel is True


def test_decode_sparse_meta_and_subclass_tensors() -> None:
    sparse = torch.eye(50).to_sparse()
    assert torch.equal(round_trip(sparse).to_dense(), torch.eye(50))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that CSR is in beta
        csr = torch.eye(50).to_sparse_csr()
    assert torch.equal(round_trip(csr).to_dense(), torch.eye(50))
    meta = round_trip(torch.empty(3, 4, device="meta"))
    assert (meta.device.type, meta.shape) == ("meta", (3, 4))
    assert type(round_trip(torch.zeros(5000).as_subclass(Tagged))) is Tagged


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_decode_accelerator_tensors_on_host() -> None:
    for layout, make in LAYOUTS.items():
        sent = make(random_tensor(torch.bfloat16).cuda()).requires_grad_()
        payload = encode(sent, inband_below=0)
        assert sum(each.nbytes for each in payload.buffers) <= sent.numel() * 2
        got = decode(payload)
        assert got.device.type == "cpu"
        assert_same(got, sent.detach().cpu().requires_grad_())
        assert got.is_leaf, layout
    lazy = torch.randn(20, 30, dtype=torch.complex64, device="cuda").conj()
    assert torch.equal(round_trip(lazy), lazy.cpu())


class Tagged(torch.Tensor):
    pass
