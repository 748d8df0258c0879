"""An engine that draws random numbers; its module loads the libraries for that, as those of train
engines do.
"""

from __future__ import annotations

import random

import numpy
import torch


class Drawing:
    """Draws when it is constructed and when it is asked."""

    def __init__(self) -> None:
        self.first = self.draw()

    def draw(self) -> tuple[float, float, float]:
        """One number of each random generator that configure seeds."""
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    def drawn_first(self) -> tuple[float, float, float]:
        """The numbers that the constructor drew."""
        return self.first
