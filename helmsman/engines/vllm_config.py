"""Configuration of a vLLM instance; can be imported without vLLM."""

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
    "stream_interval": "set VLLMConfig.stream_interval",
    "enable_prefix_caching": "set VLLMConfig.enable_prefix_caching",
    "enable_sleep_mode": "set VLLMConfig.enable_sleep_mode",
    "worker_extension_cls": "weight updates need the engine's own extension; leave it out",
}
"""Keys that engine_args must not have -> the alternative."""


class VLLMConfig(
    msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Configuration of a vLLM engine. Fields shared with RolloutConfig have the same meaning."""

    model: str
    """Local folder in the Hugging Face layout."""
    max_concurrency: int = 256
    """Sequences that are decoded together (vLLM's ``max_num_seqs``); further requests wait in vLLM.
    """
    stream_interval: int = 8
    """Tokens that vLLM collects before it passes them on, which keeps its event loop free. The
    first token, and those before an update or an abort, are passed on at once.
    """
    max_model_len: int = 2048
    """Maximum tokens of a sequence, prompt and continuation; a longer continuation ends with
    stop_reason 'length'.
    """
    dtype: str = "auto"
    """Type of weights and cache, such as ``bfloat16``; ``auto`` is bfloat16 on devices, float32 on
    the host.
    """
    seed: int = 0
    """Seed of vLLM's own random numbers, used by requests that have no seed."""
    tensor_parallel_size: int = 1
    """Ranks over which each layer is split."""
    pipeline_parallel_size: int = 1
    """Ranks over which the layers are divided."""
    distributed_executor_backend: str | None = None
    """Start of vLLM's ranks: ``mp`` (processes of this node) or ``ray``. None: ``mp`` for
    several ranks, on each node of the worker's instance. With ``ray``, each bundle of the worker's
    placement group must have one device.
    """
    gpu_memory_utilization: float = 0.9
    """Fraction of a device's memory that vLLM uses for weights and cache; use less when colocated
    with a trainer.
    """
    enforce_eager: bool = False
    """Run without compiled graphs: starts faster, decodes slower."""
    enable_prefix_caching: bool = True
    """Cache keys and values by prompt prefix. Samples of one prompt share its computation this way.
    """
    keep_prefix_cache: bool = False
    """Let prompts reuse keys and values that were computed under earlier weights. By default, an
    update empties the prefix cache.
    """
    in_flight: InFlight | None = None
    """Treatment of requests in flight and their keys and values in updates. ``keep`` (also None)
    continues with them, like HFRolloutEngine. ``recompute`` makes vLLM compute them again under the
    new weights. vLLM also recomputes requests that it preempts for lack of memory. A request
    without a token yet always starts again.
    """
    load_format: LoadFormat = "auto"
    """Source of the first weights: the folder, or ``dummy`` for random ones that an update
    replaces.
    """
    enable_sleep_mode: bool = False
    """Make vLLM allocate memory such that ``sleep`` can release it; devices only."""
    max_lora_rank: int = 0
    """Largest rank of LoRA adapters; 0 for none."""
    max_loras: int = 1
    """Adapters in one batch."""
    adapters: dict[str, str] = {}
    """LoRA adapters to load at the start: name -> folder."""
    adapter: str = ""
    """Name of the adapter that requests use; '' for none."""
    bucket_bytes: int = 256 << 20
    """Bytes of weights that are passed to vLLM's processes at once, through shared memory; a larger
    tensor is passed alone.
    """
    close_timeout_s: float = 60.0
    """Seconds that destroy waits for vLLM's processes to end before it kills them."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's ``AsyncEngineArgs``; they override the fields above. Arguments
    that the engine itself depends on can only be set by their fields.
    """

    def __post_init__(self) -> None:
        least = {
            "max_concurrency": 1,
            "stream_interval": 1,
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
        if int(self.engine_args.get("data_parallel_size", 1)) > 1:
            raise ValueError(
                f"engine_args has data_parallel_size {self.engine_args['data_parallel_size']}; "
                "expected 1, because vLLM reports the outcome of a weight update from one of its "
                "engines only. Use more instances: Job(replicas=...)"
            )
        for name, instead in _BY_FIELD.items():
            if name in self.engine_args:
                raise ValueError(
                    f"engine_args has {name!r}, which the engine sets itself: {instead}"
                )
        if self.adapters and not self.max_lora_rank:
            raise ValueError(
                "adapters are given but max_lora_rank is 0; set it to the largest of their ranks"
            )
        if self.adapter and self.adapter not in self.adapters:
            raise ValueError(
                f"adapter is {self.adapter!r}; expected a name in adapters, which "
                f"{'has ' + ', '.join(self.adapters) if self.adapters else 'is empty'}"
            )
