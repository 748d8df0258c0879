"""Settings of the importance weights between sampler and trainer.

``helmsman.engines.losses.corrections`` computes them; it needs torch, which a driver may lack.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class Correction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Importance weights of tokens, from the ratio of the trainer's probability to the rollout's.

    The two differ by kernels and types, and by the age of the weights.
    """

    mode: Literal["none", "truncate", "mask", "reject"] = "none"
    """``truncate`` limits a weight to ``high`` (TIS); ``mask`` sets weights outside of ``low`` to
    ``high`` to 0 (IcePop, arXiv:2510.18855); ``reject`` does so too, and weights inside are 1.
    The loss is then relative to the trainer's log-probabilities before the step."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """``token``: each token has its own ratio; ``sequence``: the product over an answer's tokens;
    ``geometric``: their geometric mean (arXiv:2507.18071)."""
    low: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Lower end of the band, for ``mask`` and ``reject``."""
    high: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """Upper end of the band, or the cap of ``truncate``."""
    outlier: Annotated[float, msgspec.Meta(gt=1)] | None = None
    """An answer with a token whose ratio is above this, or below 1 over it, is left out of the
    loss; null for none. Beside any mode, ``none`` included."""

    def __post_init__(self) -> None:
        """Raise ValueError for an empty band."""
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; expected low below high")
        if self.mode == "truncate" and self.low:
            raise ValueError(
                f"low is {self.low}, but mode 'truncate' has a cap only; give mode 'mask' or "
                "'reject' for a band"
            )
