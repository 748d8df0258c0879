"""Context managers that close themselves."""

from __future__ import annotations

import abc
from typing import Self


class Closing(abc.ABC):
    """A ``with`` statement closes it at its end."""

    __slots__ = ()

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
