"""Configuration of the training engine."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from helmsman.api.engines import Head
from helmsman.api.suggestions import Suggesting

Offload: TypeAlias = Literal["none", "optimizer", "all"]
"""State that is kept on the host while it is not in use."""

Init: TypeAlias = Literal["nothing", "value_head"]
"""Parameters that may be drawn from a seed when the files of a model lack them."""

LOSS_NAMES = (
    *("sft", "distill", "grpo", "ppo", "decoupled_ppo", "gspo", "cispo"),
    *("value", "dpo", "reward_model"),
)
"""Short names of losses: the keys of helmsman.engines.losses.LOSSES, which imports torch."""


class LoRA(
    msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Low-rank adapters (arXiv:2106.09685): the model is frozen, and only they are trained."""

    rank: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Rank of the matrices A and B."""
    alpha: Annotated[float, msgspec.Meta(gt=0)] = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Layers with an adapter, by PEFT's rules: a list of whole names or their ends, such as
    ``[q_proj, v_proj]``; a regular expression of whole names; or ``all-linear``, every linear layer
    but the output layer. Experts that are one tensor are meant by name (``experts.gate_up_proj``).
    """
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Dropout of the adapters' inputs in training."""
    dtype: str = "float32"
    """Type of the adapters' parameters and their optimizer state."""
    path: str = ""
    """PEFT folder to start from, instead of rank, alpha and targets; empty for a new adapter."""

    def __post_init__(self) -> None:
        """Raise ValueError if ``path`` decides a given field, or ``targets`` is invalid."""
        try:
            re.compile(self.targets if isinstance(self.targets, str) else "")
        except re.error as error:
            raise ValueError(
                f"targets is {self.targets!r} ({error}), expected a regular expression, a list of "
                "names, or all-linear"
            ) from None
        given = [name for name in ("rank", "alpha", "targets") if self.path and self._is_set(name)]
        if given:
            raise ValueError(
                f"path and {', '.join(given)} are both given; the adapter in {self.path} has its "
                f"own {', '.join(given)}"
            )

    def _is_set(self, name: str) -> bool:
        fields = {each.name: each.default for each in msgspec.structs.fields(type(self))}
        return bool(getattr(self, name) != fields[name])


class TrainConfig(
    msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Configuration of a training engine: model, optimizer, parallel layout and limits."""

    model: str | dict[str, Any]
    """Local folder in the Hugging Face layout, or the entries of a configuration, including
    ``model_type``.
    """
    head: Head = "lm"
    """``lm`` trains a policy. ``value`` trains a critic or a reward model, which outputs a number
    for each token. Its linear layer is exported in the layout of ``transformers`` sequence
    classification.
    """
    init: Init = "nothing"
    """Parameters that are drawn from ``seed`` when the files of ``model`` lack them: ``nothing``,
    or ``value_head``, the linear layer of a new critic or reward model.
    """
    frozen: bool = False
    """The engine only forwards and evaluates, for example as a reference or a reward model. It has
    no optimizer, parameters are kept in ``compute_dtype``, and train_batch, save and load raise
    RuntimeError.
    """
    lora: LoRA | None = None
    """Adapters to train instead of the model, whose parameters are kept in ``compute_dtype``."""
    lr: float = 1e-5
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments (arXiv:1711.05101)."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    num_warmup_steps: int = 0
    """Steps over which the learning rate rises linearly; it is constant afterwards."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global 2-norm; None disables clipping."""
    max_tokens_per_micro_batch: int = 16384
    """Maximum tokens of one forward pass per data-parallel rank, padding included. Its
    context-parallel ranks share them.
    """
    compute_dtype: str = "auto"
    """Type of the forward and backward pass, such as ``bfloat16``; ``auto`` is bfloat16 on devices,
    float32 on the host. Parameters and gradients of a trained model are always float32. During a
    call, a single rank also has a copy of its parameters in this type, several ranks of a layer.
    """
    reduce_dtype: str = "float32"
    """Type in which ranks sum gradients. ``bfloat16`` sends half of the bytes, and rounds the sum;
    replicas then also add up micro-batches in it.
    """
    moments_dtype: str = "float32"
    """Type that keeps AdamW's moments between steps. ``bfloat16`` takes 4 bytes per parameter
    instead of 8; the step itself computes in float32. It rounds to nearest, so a second beta above
    0.995 leaves the moments of falling gradients too large. Loss of a small regression after 2000
    steps, beside float32: 0.2 % higher at 0.95, 1 % at 0.99, 16 % at 0.999.
    """
    seed: int = 0
    """Seed of randomly initialised weights (a configuration as ``model``, or ``init``); the same on
    every rank.
    """
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations
    (arXiv:1604.06174).
    """
    compile_layers: bool = False
    """Compile each decoder layer with torch.compile. The first steps take minutes; packed batches
    of other lengths are not compiled again. Attention over packed or context-parallel rows stays as
    it is, and divides each layer into four graphs. Needs a C++ compiler on the host, and Triton on
    GPUs.
    """
    reshard_after_forward: bool = True
    """Free each layer's gathered parameters between forward and backward (ZeRO-3) instead of
    keeping them (ZeRO-2).
    """
    reshard_after_backward: bool = True
    """Free each layer's gathered parameters after the backward pass of every micro-batch. False
    frees them after the last one: a step of several micro-batches then gathers each layer once per
    micro-batch, or once in all if ``reshard_after_forward`` is False, too. The device needs room
    for the whole model in ``compute_dtype``.
    """
    num_prefetched_layers: int = 0
    """Layers whose parameters are gathered ahead of the one that computes. 0 leaves it to FSDP,
    which gathers one ahead; more hide a slow network, and each keeps one more layer gathered.
    """
    tensor_parallel_size: int = 1
    """Ranks that split every layer's matrices and process the same tokens (arXiv:1909.08053). They
    are consecutive ranks and should share a node.
    """
    context_parallel_size: int = 1
    """Ranks that split the tokens of a sequence and, inside attention, its heads
    (arXiv:2309.14509).
    """
    data_parallel_replicas: int = 1
    """Number of copies of the sharded model. With 2, each half of the data-parallel ranks shards
    all parameters. More copies gather parameters among fewer ranks and use more memory.
    """
    packing: bool | None = None
    """Whether the samples of a micro-batch form one row without padding, with positions that
    restart at each sample. None packs if the model supports it.
    """
    offload: Offload = "none"
    """State kept on the host while not in use. ``optimizer``: the optimizer state between steps;
    the device needs room for it during a step. ``all``: parameters, gradients and optimizer state;
    the optimizer also steps on the host (FSDP's CPUOffloadPolicy).
    """
    rendezvous_timeout_s: float = 300.0
    """Seconds that ranks wait for each other at the start."""
    collective_timeout_s: float = 1800.0
    """Seconds that a collective waits for the slowest rank."""

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid number; parallel sizes are checked by the engine."""
        if self.lora is not None and self.frozen:
            raise ValueError("frozen is true and lora is given: a frozen engine trains no adapters")
        for name in ("lr", "eps", "weight_decay", "num_warmup_steps", "num_prefetched_layers"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} is {value}; expected 0 or more, and finite")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; expected two numbers from 0 to below 1")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm is {self.max_grad_norm}; expected a number above 0, or None for "
                "no limit"
            )
        for name in ("reduce_dtype", "moments_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16"):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected 'float32' or 'bfloat16'"
                )
        if self.max_tokens_per_micro_batch < 1:
            raise ValueError(
                f"max_tokens_per_micro_batch is {self.max_tokens_per_micro_batch}; expected 1 or "
                "more"
            )
        for name in ("rendezvous_timeout_s", "collective_timeout_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} is {value}; expected seconds above 0")
