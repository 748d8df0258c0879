"""Tests that the codec returns arrays, containers, classes and handles as they were sent."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from helmsman._wire.codec import Payload, ResultHandle, decode, encode
from helmsman.api.errors import HandleLostError, NotLoadableError, NotSerializableError


def round_trip(value: Any, **options: Any) -> Any:
    return decode(encode(value, **options))


# --- arrays and containers ------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.one_of(
        st_numpy.scalar_dtypes(),
        st_numpy.byte_string_dtypes(),
        st_numpy.unicode_string_dtypes(),
        st_numpy.array_dtypes(),
    ).flatmap(
        lambda dtype: st_numpy.arrays(
            dtype, st_numpy.array_shapes(min_dims=0, min_side=0, max_side=6)
        )
    ),
    st.sampled_from([0, 4096]),
    st.booleans(),
)
def test_decode_arrays_of_every_kind(sent: np.ndarray, inband_below: int, gappy: bool) -> None:
    sent = sent[..., ::2].T if gappy and sent.ndim else sent
    got = round_trip(sent, inband_below=inband_below)
    # NumPy's own pickling brings some arrays of a foreign byte order to the machine's.
    sent, native = (each.astype(each.dtype.newbyteorder("=")) for each in (sent, got))
    assert (type(got), native.dtype, got.shape) == (type(sent), sent.dtype, sent.shape)
    assert native.tobytes() == sent.tobytes()
    assert got.flags.writeable


def test_decode_arrays_of_objects_and_with_gaps() -> None:
    assert round_trip(np.array([{1: 2}, None, "x"], dtype=object)).tolist() == [{1: 2}, None, "x"]
    base = np.arange(100_000).reshape(1000, 100)
    payload = encode(base[:, :10])
    assert [each.nbytes for each in payload.buffers] == [80_000]
    assert np.array_equal(decode(payload), base[:, :10])


def test_decode_values_private_and_writable() -> None:
    sent = {"array": np.zeros(5000), "bytes": bytearray(9000)}
    got = round_trip(sent)
    got["array"] += 1
    got["bytes"][0] = 1
    assert not sent["array"].any()  # type: ignore[attr-defined]
    assert not sent["bytes"][0]  # type: ignore[index]
    read_only = np.arange(5000)
    read_only.flags.writeable = False
    assert not round_trip(read_only).flags.writeable


def test_decode_object_identity() -> None:
    array = np.zeros(2000)
    first, second = round_trip((array, array))
    assert first is second


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=12)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.none() | st.binary(), inner, max_size=12)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=30,
)


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return dict, [(type(key), types_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types_of(item) for item in value]
    return type(value)


@settings(max_examples=80)
@given(plain)
def test_decode_plain_values(sent: Any) -> None:
    got = round_trip(sent)
    assert got == sent
    assert types_of(got) == types_of(sent)


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    array: Any


@dataclasses.dataclass(frozen=True)
class Config:
    color: Color
    inner: dict[int, tuple[str, ...]]


class Sample(msgspec.Struct, frozen=True):
    tokens: list[int]
    config: Config | None = None


def test_decode_structs_dataclasses_and_enums() -> None:
    sent = Sample([1, 2], Config(Color.RED, {3: ("a",)}))
    got = round_trip({"sample": sent, 1: [sent]})
    assert got == {"sample": sent, 1: [sent]}
    assert got["sample"] is got[1][0]
    assert got["sample"].config.color is Color.RED
    point = round_trip(Point(1, np.ones(2)))
    assert type(point) is Point
    assert round_trip(Color.RED) is Color.RED


def test_decode_functions_and_local_classes() -> None:
    offset = np.arange(2000)

    class Local:
        def __init__(self) -> None:
            self.value = 4

        def method(self) -> int:
            return self.value

    assert np.array_equal(round_trip(lambda x: x + offset)(1), offset + 1)
    assert round_trip(functools.partial(max, 3))(2) == 3
    got = round_trip([Local, Local()])
    assert got[0] is Local
    assert type(got[1]) is Local
    assert round_trip(Local().method)() == 4


SCRIPT = """
from __future__ import annotations
import dataclasses, enum, functools, pickle, sys
from typing import Generic, TypeVar
import msgspec
from helmsman._wire.codec import encode, decode

T = TypeVar("T")

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Config:
    color: Color = Color.RED
    def double(self): return Config, 2
    @functools.cached_property
    def once(self): return [self.color]

class Base(msgspec.Struct, kw_only=True, frozen=True, tag="base"):
    '''of the script'''
    steps: int
    names: list[str] = []
    extra: dict[str, int] = msgspec.field(default_factory=lambda: {"one": 1}, name="EXTRA")
    def next(self): return Base(steps=self.steps + 1)
    @property
    def double(self): return self.steps * 2
    def __post_init__(self):
        if self.steps < 0: raise ValueError("negative")

class Derived(Base, frozen=True, rename="upper"):
    last: Color = Color.RED
    def next(self): return super().next()

class Box(msgspec.Struct, Generic[T]):
    item: T

value = [Config(), Derived(steps=3), Box(5), Color.RED, lambda: Color.RED]
payload = encode(value)
back = decode(payload)
assert [type(each) for each in back[:4]] == [Config, Derived, Box, Color] and back[:4] == value[:4]
sys.stdout.buffer.write(payload.data)
"""

RECEIVER = """
import sys, msgspec
from helmsman._wire.codec import Payload, decode, encode
data = sys.stdin.buffer.read()
config, derived, box, red, function = decode(Payload(data, [], []))
again = decode(Payload(data, [], []))
assert type(again[1]) is type(derived) and again[1] == derived and again[3] is red
assert config.once is config.once and config.once == [red]
assert config.color is red and function() is red and config.double() == (type(config), 2)
base = type(derived).__bases__[0]
assert derived.double == 6 and derived.next() == base(steps=4) and base.__doc__ == "of the script"
assert derived.extra == {"one": 1} and derived.names == [] and derived.last is red and box.item == 5
fields = {"type": "base", "steps": 1, "names": [], "EXTRA": {"one": 1}}
assert msgspec.json.decode(msgspec.json.encode(base(steps=1))) == fields
assert b'"LAST"' in msgspec.json.encode(derived)
for make in (base, type(derived)):
    try: make(steps=-1)
    except ValueError: pass
    else: raise AssertionError("__post_init__ did not run")
try: derived.steps = 1
except AttributeError: pass
else: raise AssertionError("not frozen")
try: base(1)
except TypeError: pass
else: raise AssertionError("not kw_only")
assert type(decode(encode(derived))) is type(derived)
"""


def test_decode_classes_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    sent = subprocess.run([sys.executable, str(script)], capture_output=True, env=env, check=False)
    assert sent.returncode == 0, sent.stderr.decode()
    received = subprocess.run(
        [sys.executable, "-c", RECEIVER],
        input=sent.stdout,
        capture_output=True,
        env=env,
        check=False,
    )
    assert received.returncode == 0, received.stderr.decode()


# --- handles --------------------------------------------------------------------------------------


def handle(number: int) -> ResultHandle:
    return ResultHandle(
        id=f"h{number}", worker_id="actor/0", location=("socket", number), nbytes=8, summary="int"
    )


def test_decode_resolves_handles_once() -> None:
    payload = encode({"a": [handle(1), handle(2)], "b": (handle(1), {"c": handle(1)})})
    assert payload.handles == [handle(1), handle(2)]
    resolved: list[str] = []

    def resolve(each: ResultHandle) -> Any:
        resolved.append(each.id)
        return [each.location[1]]

    got = decode(payload, resolve=resolve)
    assert got == {"a": [[1], [2]], "b": ([1], {"c": [1]})}
    assert got["a"][0] is got["b"][0]
    assert resolved == ["h1", "h2"]


def test_decode_errors_of_resolve() -> None:
    def resolve(each: ResultHandle) -> Any:
        raise HandleLostError(worker_id=each.worker_id, handle_id=each.id, reason="released")

    with pytest.raises(HandleLostError, match="released"):
        decode(encode([handle(1)]), resolve=resolve)


def test_payload_pickles_buffers_out_of_band() -> None:
    sent = [np.ones(5000), handle(1)]
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(encode(sent), 5, buffer_callback=buffers.append)
    assert len(stream) < 1000
    payload = pickle.loads(stream, buffers=[bytes(each.raw()) for each in buffers])
    got = decode(payload)
    assert got[0].sum() == 5000
    assert got[0].flags.writeable
    assert got[1] == handle(1)


# --- errors ---------------------------------------------------------------------------------------


class Holder:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Slotted:
    __slots__ = ("lock",)


class LeavesOut(Holder):
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


@dataclasses.dataclass
class WithLock:
    name: str
    lock: Any


class StructWithLock(msgspec.Struct):
    name: str
    lock: Any


def slotted() -> Slotted:
    made = Slotted()
    made.lock = threading.Lock()  # type: ignore[attr-defined]
    return made


def closure() -> Callable[[], Any]:
    guard = threading.Lock()
    return lambda: guard


def local_class() -> type[Any]:
    """A class whose first methods refer to the class, so they fail with each of its parts."""
    guard = threading.Lock()

    class Local(Holder):
        def __init__(self) -> None:
            super().__init__()

        def make(self) -> Any:
            return Local()

        def hold(self) -> Any:
            return guard

    return Local


def cyclic() -> Holder:
    made = Holder(first=1)
    made.me = made  # type: ignore[attr-defined]
    made.deep = [made, {"x": (made, threading.Lock())}]  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (lambda: [{"cfg": Holder(lock=threading.Lock())}], "args[0]['cfg'].lock"),
        (threading.Lock, "args"),
        (lambda: ([1, 2, {3: threading.Lock()}],), "args[0][2][3]"),
        (lambda: [WithLock("a", threading.Lock())], "args[0].lock"),
        (lambda: {"s": StructWithLock("a", threading.Lock())}, "args['s'].lock"),
        (lambda: [slotted()], "args[0].lock"),
        (lambda: [closure()], "args[0].<closure>.guard"),
        (lambda: [local_class()], "args[0].hold.<closure>.guard"),
        (lambda: [functools.partial(print, threading.Lock())], "args[0].args[0]"),
        (lambda: [LeavesOut(lock=threading.Lock(), other=[threading.Lock()])], "args[0].other[0]"),
        (lambda: [cyclic()], "args[0].deep[1]['x'][1]"),
        (lambda: [np.zeros(5000), Refuses()], "args[1]"),
        (lambda: [(i for i in range(3))], "args[0]"),
        (lambda: Point(1, threading.Lock()), "args.array"),
        (lambda: [Holder(lock=threading.Lock()).__init__], "args[0].__self__.lock"),  # type: ignore[misc]
        (lambda: [np.array([1, threading.Lock()], dtype=object)], "args[0]"),
    ],
)
def test_encode_error_path(value: Callable[[], Any], path: str) -> None:
    with pytest.raises(NotSerializableError) as caught:
        encode(value(), root="args")
    assert caught.value.path.startswith(path)
    assert caught.value.__cause__ is not None
    if path.endswith("lock"):
        assert caught.value.path == path
        assert caught.value.value_type == "_thread.lock"
        assert caught.value.reason == "TypeError: cannot pickle '_thread.lock' object"


def test_encode_nested_too_deep() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(NotSerializableError, match="recursion") as caught:
        encode(value)
    assert caught.value.path == "value"


def test_decode_unloadable_values() -> None:
    data = pickle.dumps(Config(Color.RED, {}), 5).replace(__name__.encode(), b"x" * len(__name__))
    with pytest.raises(NotLoadableError, match="ModuleNotFoundError: No module named 'xxx"):
        decode(Payload(data, [], []))
    with pytest.raises(NotLoadableError, match=r"^value .*UnpicklingError"):
        decode(Payload(b"\x80\x05garbage", [], []))
    with pytest.raises(NotLoadableError):
        decode(Payload(encode(np.zeros(5000)).data, [], []))


def test_decode_exiting_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "codec_script.py").write_text(
        "import argparse; argparse.ArgumentParser().parse_args(['--unknown'])"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotLoadableError, match="SystemExit: 2"):
        decode(Payload(b"ccodec_script\nThing\n.", [], []))
