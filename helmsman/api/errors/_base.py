"""Base class of all errors, with declared fields and pickling, and shared parts of messages."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, ClassVar, dataclass_transform


class _Shown:
    """Values of an error's fields for its template; a sequence becomes its items, or 'none'."""

    def __init__(self, error: HelmsmanError) -> None:
        self._error = error

    def __getitem__(self, name: str) -> Any:
        value = getattr(self._error, name)
        return (", ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else value


def _rebuild(cls: type[HelmsmanError], message: str, state: dict[str, Any]) -> HelmsmanError:
    error = cls.__new__(cls)
    # The built-in __init__ must run. Without it, an unpickled TimeoutError has no message and an
    # ImportError has no msg.
    super(HelmsmanError, error).__init__(message)
    error.__dict__.update(state)
    return error


@dataclass_transform(kw_only_default=True, eq_default=False)
class HelmsmanError(Exception):
    """Base of all our errors.

    A subclass declares its fields as annotations; a field with a default is optional. Fields become
    keyword arguments and attributes, and survive pickling. The message is ``template``, in which
    ``{name}`` is a field or a property, or the result of ``describe()``. A class without fields
    takes its message as the argument.

    Args:
        message: The message; computed by ``describe()`` when empty.
        **fields: A value for each declared field.

    Raises:
        TypeError: A required field is missing, or a field is unknown.
    """

    __module__ = "helmsman.api.errors"  # the module that all errors are imported from
    template: ClassVar[str] = ""
    field_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = [
            name
            for base in cls.__bases__
            if issubclass(base, HelmsmanError)
            for name in base.field_names
        ]
        own = [name for name, kind in cls.__annotations__.items() if "ClassVar" not in str(kind)]
        cls.field_names = tuple(dict.fromkeys(inherited + own))
        if cls.__module__.startswith(f"{__package__}."):
            cls.__module__ = HelmsmanError.__module__

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        self.__dict__.update(fields)
        missing = {name for name in self.field_names if not hasattr(self, name)}
        if wrong := missing | (fields.keys() - self.field_names if self.field_names else set()):
            raise TypeError(
                f"{type(self).__name__}: missing or unknown {sorted(wrong)}, its fields are "
                f"{self.field_names}"
            )
        super().__init__(message or self.describe())

    def describe(self) -> str:
        """Compute the message: the failure, observed and expected values, then the next step."""
        return self.template.format_map(_Shown(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.__dict__.copy())


class _LoggedError(HelmsmanError):
    """An error of a process that has a log; its template ends with ``{log}``."""

    log_path: str = ""
    log_tail: str = ""

    @property
    def log(self) -> str:
        return _log_section(self.log_path, self.log_tail)


# --- parts of messages ----------------------------------------------------------------------------


def _log_section(log_path: str, log_tail: str = "") -> str:
    """Return lines that name a log and quote its end; empty without a log."""
    if not log_tail:
        return f"\n  log: {log_path}" if log_path else ""
    num_lines = log_tail.rstrip("\n").count("\n") + 1
    return f"\n  log: {log_path}, last {num_lines} lines:\n{quoted(log_tail)}"


def stack_section(verb: str, stack: str) -> str:
    return f"\n  its engine thread {verb} at:\n{quoted(stack)}" if stack else ""


def output_section(log_tail: str) -> str:
    return f"\nlast lines of its output:\n{indented(log_tail.strip() or '(nothing)')}"


def quoted(text: str) -> str:
    return indented(text.rstrip("\n"), "  | ")


def indented(text: str, prefix: str = "  ") -> str:
    return "\n".join(prefix + line for line in text.split("\n"))


def few(items: Sequence[str], limit: int = 8) -> str:
    """Join the first items and state the number of the others."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more or "none"


def signal_name(number: int) -> str:
    """Return the name of a signal number, such as ``SIGKILL``, or ``signal 99`` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
