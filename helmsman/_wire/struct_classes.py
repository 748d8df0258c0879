"""Pickling by value of msgspec Struct classes of the user's script, which workers cannot import.

cloudpickle (3.1) creates an empty class and adds its attributes later, which gives a Struct without
fields. This module creates the class with its fields and configuration at once. Methods and
annotations follow, since they may refer to the class itself.
"""

from __future__ import annotations

import inspect
import threading
import uuid
import weakref
from types import MemberDescriptorType
from typing import Any

import msgspec
from msgspec import NODEFAULT

StructMeta: type[type] = type(msgspec.Struct)


class _Probe(msgspec.Struct):
    field: list[int] = []


_Factory: Any = type(_Probe.__struct_defaults__[0])

# A class that returns, or arrives twice, is the existing one.
_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_ids: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_complete: weakref.WeakSet[type] = weakref.WeakSet()
_lock = threading.Lock()

_CONFIG = (
    "frozen",
    "eq",
    "order",
    "array_like",
    "gc",
    "repr_omit_defaults",
    "omit_defaults",
    "forbid_unknown_fields",
    "weakref",
    "dict",
    "cache_hash",
    "tag",
    "tag_field",
)
_MADE_WITH_THE_CLASS = frozenset(
    {"__annotations__", "__slots__", "__dict__", "__weakref__", "__module__", "__qualname__"}
)
_NEEDED_AT_ONCE = "__orig_bases__"  # typing.Generic reads it while the class is created


def reduce_struct_class(cls: Any) -> tuple[Any, ...]:
    """Return pickle's instructions to recreate a Struct class."""
    with _lock:
        class_id = _ids.setdefault(cls, uuid.uuid4().hex)
        _classes[class_id] = cls
        _complete.add(cls)
    annotations = inspect.get_annotations(cls)
    own = [name for name in cls.__struct_fields__ if name in annotations]
    encode_names = dict(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    defaults = dict(
        zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False)
    )
    config = {name: getattr(cls.__struct_config__, name) for name in _CONFIG}
    config["kw_only"] = any(name not in cls.__match_args__ for name in own)
    config["rename"] = {
        name: encode_names[name] for name in own if encode_names[name] != name
    } or None
    fields = {name: _described(defaults.get(name, NODEFAULT)) for name in own}
    names = (cls.__name__, cls.__qualname__, cls.__module__)
    attributes = {
        name: value
        for name, value in cls.__dict__.items()
        if name not in _MADE_WITH_THE_CLASS and not isinstance(value, MemberDescriptorType)
    }
    # msgspec looks up __post_init__ only while the class is created: a stand-in calls the real one,
    # which follows.
    at_once = {"__post_init__": _post_init} if "__post_init__" in attributes else {}
    if _NEEDED_AT_ONCE in attributes:
        at_once[_NEEDED_AT_ONCE] = attributes.pop(_NEEDED_AT_ONCE)
    arguments = (class_id, type(cls), names, cls.__bases__, fields, config, at_once)
    return _make, arguments, (annotations, attributes), None, None, _fill


def _described(default: Any) -> tuple[str, Any]:
    """Return a default as parts that can be pickled; msgspec's factory holder cannot."""
    if default is NODEFAULT:
        return "none", None
    if isinstance(default, _Factory):
        return "factory", default.factory
    return "value", default


def _make(
    class_id: str,
    meta: type[type],
    names: tuple[str, str, str],
    bases: tuple[type, ...],
    fields: dict[str, tuple[str, Any]],
    config: dict[str, Any],
    at_once: dict[str, Any],
) -> type:
    with _lock:
        known = _classes.get(class_id)
    if known is not None:
        return known
    name, qualified_name, module = names
    namespace: dict[str, Any] = {
        "__module__": module,
        "__qualname__": qualified_name,
        "__annotations__": dict.fromkeys(fields, Any),
        **at_once,
    }
    for field, (kind, default) in fields.items():
        if kind == "factory":
            namespace[field] = msgspec.field(default_factory=default)
        elif kind == "value":
            namespace[field] = msgspec.field(default=default)
    made: type = meta(name, bases, namespace, **config)
    with _lock:
        _ids[made] = class_id
        return _classes.setdefault(class_id, made)


def _fill(cls: type, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    with _lock:
        if cls in _complete:
            return
        _complete.add(cls)
    annotations, attributes = state
    cls.__annotations__ = annotations
    for name, value in attributes.items():
        setattr(cls, name, value)


def _post_init(self: Any) -> None:
    type(self).__post_init__(self)
