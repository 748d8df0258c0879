"""An engine that draws random numbers; its module imports the libraries, as train engines do."""

from __future__ import annotations

import random

import numpy
import torch


class Drawing:
    """Draws random numbers in its constructor and in calls."""

    def __init__(self) -> None:
        self.first = self.draw()

    def draw(self) -> tuple[float, float, float]:
        """Draw a number from each random generator that configure seeds."""
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    def drawn_first(self) -> tuple[float, float, float]:
        return self.first
