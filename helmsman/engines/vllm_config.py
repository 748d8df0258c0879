"""What a vLLM instance serves, and how; read without vLLM."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from helmsman.api.suggestions import Suggesting

LoadFormat = Literal["auto", "safetensors", "dummy"]
InFlight = Literal["keep", "recompute"]

_BY_FIELD = {
    "model": "set VLLMConfig.model",
    "max_model_len": "set VLLMConfig.max_model_len",
    "max_num_seqs": "set VLLMConfig.max_concurrency",
    "enable_prefix_caching": "set VLLMConfig.enable_prefix_caching",
    "enable_sleep_mode": "set VLLMConfig.enable_sleep_mode",
    "worker_extension_cls": "it is by its own that weights are updated; leave it out",
}
"""What engine_args may not have, and what to do."""


class VLLMConfig(
    msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The fields of RolloutConfig mean here what they mean there."""

    model: str
    """Local folder in the Hugging Face layout."""
    max_concurrency: int = 64
    """Sequences that are decoded together (vLLM's ``max_num_seqs``); more wait in vLLM."""
    max_model_len: int = 2048
    """Most tokens of a sequence, prompt and continuation; a longer continuation ends with
    stop_reason 'length'.
    """
    dtype: str = "auto"
    """Type of weights and cache, such as ``bfloat16``; ``auto`` is bfloat16 on devices, float32 on
    the host.
    """
    seed: int = 0
    """Of vLLM's own random numbers, which requests without a seed draw from."""
    tensor_parallel_size: int = 1
    """Ranks over which each layer is split."""
    pipeline_parallel_size: int = 1
    """Ranks over which the layers are divided."""
    distributed_executor_backend: str | None = None
    """How vLLM starts its ranks: ``mp`` (processes of this node), ``ray``, or what vLLM chooses.
    ``ray`` in a Ray worker of a ``deferred`` instance takes the bundles of its placement group,
    which may be on several nodes; not run yet."""
    gpu_memory_utilization: float = 0.9
    """Part of a device's memory that vLLM takes for weights and cache; colocated with a trainer,
    less.
    """
    enforce_eager: bool = False
    """Run without compiled graphs: starts sooner, decodes slower."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of what was computed, for prompts that begin alike; samples of one
    prompt share it by this.
    """
    keep_prefix_cache: bool = False
    """Let prompts use keys and values that were computed under earlier weights. By default, an
    update parts with them.
    """
    in_flight: InFlight | None = None
    """What an update does to the keys and values of requests in flight: ``keep`` (also None) goes
    on with them, as HFRolloutEngine does; ``recompute`` has vLLM compute them again by the new
    weights. vLLM also recomputes those that it drops for want of room. A request that has no token
    yet begins again in any case."""
    load_format: LoadFormat = "auto"
    """Where the first weights come from: the folder, or ``dummy`` for random ones, which an update
    replaces.
    """
    enable_sleep_mode: bool = False
    """Have vLLM allocate in a way that lets ``sleep`` give memory back; devices only."""
    max_lora_rank: int = 0
    """Largest rank of LoRA adapters; 0 for none."""
    max_loras: int = 1
    """Adapters in one batch."""
    adapters: dict[str, str] = {}
    """LoRA adapters to load at the start: name -> folder."""
    adapter: str = ""
    """The one of them that requests use; '' for none."""
    bucket_bytes: int = 256 << 20
    """Weights that are handed to vLLM's processes at once, through shared memory; one that is
    larger goes alone.
    """
    close_timeout_s: float = 60.0
    """How long destroy waits for vLLM's processes to end before it kills them."""
    engine_args: dict[str, Any] = {}
    """Anything else that vLLM's ``AsyncEngineArgs`` takes; these win over the fields above. What
    the engine reckons with itself is set by its field alone."""

    def __post_init__(self) -> None:
        least = {
            "max_concurrency": 1,
            "max_model_len": 2,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "max_lora_rank": 0,
            "max_loras": 1,
            "bucket_bytes": 1,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {value} or more")
        if not self.close_timeout_s > 0:
            raise ValueError(f"close_timeout_s is {self.close_timeout_s}; expected more than 0")
        for name, instead in _BY_FIELD.items():
            if name in self.engine_args:
                raise ValueError(
                    f"engine_args has {name!r}, which the engine reckons with itself: {instead}"
                )
        if self.adapters and not self.max_lora_rank:
            raise ValueError(
                "adapters are given and max_lora_rank is 0; set it to the largest of their ranks"
            )
        if self.adapter and self.adapter not in self.adapters:
            raise ValueError(
                f"adapter is {self.adapter!r}; expected one of adapters: "
                f"{', '.join(self.adapters) or 'none'}"
            )
