"""Defaults that depend on machine and model: placement, engine, threads, sizes, trackers."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman import LocalScheduler
from helmsman.recipes.settings import GRPOSettings, RunSettings, devices_apart, distillation

S = TypeVar("S", bound=RunSettings)

CHOSEN = frozenset(
    {
        *("cluster.scheduler", "cluster.placement", "cluster.rollout_instances"),
        *("cluster.devices_per_node", "cluster.device_memory_gb", "cluster.train_workers"),
        *("cluster.train_cpus", "cluster.train_threads"),
        *("cluster.rollout_cpus", "cluster.rollout_threads"),
        *("rollout.engine", "rollout.max_in_flight", "tracking.to"),
    }
)
"""Settings whose default depends on the machine."""

_STATE_BYTES = 16
"""Bytes per parameter in training: float32 weight and gradient, and AdamW's two moments."""
_USABLE = 0.8
"""Fraction of a device's memory available to these sizes; the rest is for fragmentation, the
runtime and collectives."""
_MOST_TOKENS = 65536
_MOST_IN_FLIGHT = 512


class SizeChoice(msgspec.Struct, frozen=True):
    """A chosen setting with its reason."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value} ({self.reason})"


class _Choices:
    """Settings, and the choices made for them so far."""

    def __init__(self, settings: RunSettings, given: frozenset[str]) -> None:
        self.settings, self._given, self.made = settings, given, list[SizeChoice]()

    def is_given(self, *keys: str) -> bool:
        return any(key in self._given for key in keys)

    def take(self, key: str, value: Any, reason: str) -> None:
        """Choose a value, unless the user has set it."""
        if not self.is_given(key):
            self.settings = _with(self.settings, key.split("."), value)
            self.made.append(SizeChoice(key, value, reason))


def _with(found: Any, path: Sequence[str], value: Any) -> Any:
    """Return a struct or mapping with another value at a path."""
    name, *below = path
    if isinstance(found, dict):
        return {**found, name: value}
    value = _with(getattr(found, name), below, value) if below else value
    return msgspec.structs.replace(found, **{name: value})


def choose(settings: S, given: frozenset[str]) -> tuple[S, list[SizeChoice]]:
    """Choose settings that the user has not set, depending on this machine.

    Args:
        settings: The user's settings, defaults included.
        given: Dotted keys that the user has set.

    Returns:
        The settings with the choices applied, and the choices.
    """
    choices = _Choices(settings, given)
    _choose_scheduler(choices)
    _choose_devices(choices)
    _choose_groups(choices)
    _choose_threads(choices)
    _choose_trackers(choices)
    if isinstance(settings, GRPOSettings) and settings.algorithm.preset == "ppo":
        choices.take("samples_per_prompt", 1, "PPO compares an answer with the critic")
        choices.take("out", "runs/ppo", "the recipe's own folder")
    _choose_sizes(choices)
    chosen: Any = choices.settings
    return chosen, choices.made


def _choose_scheduler(choices: _Choices) -> None:
    cluster = choices.settings.cluster
    if cluster.num_nodes > 1 or cluster.address is not None:
        choices.take("cluster.scheduler", "ray", "the run has several nodes or an address")
    elif os.environ.get("RAY_ADDRESS") and importlib.util.find_spec("ray") is not None:
        choices.take("cluster.scheduler", "ray", "RAY_ADDRESS names a cluster")
    else:
        choices.take("cluster.scheduler", "local", "one machine needs no Ray")


def _choose_devices(choices: _Choices) -> None:
    if not choices.is_given("cluster.devices_per_node"):
        with LocalScheduler() as scheduler:  # only counts device files; starts no process
            num_devices = scheduler.n_gpus_per_node
        reason = f"this machine has {num_devices or 'no'} accelerators"
        if choices.settings.cluster.scheduler == "inline" and num_devices > 1:
            num_devices, reason = 1, "one rank of each model in the script's process"
        choices.take("cluster.devices_per_node", num_devices, reason)
    num_devices = choices.settings.cluster.devices_per_node
    is_asked = num_devices and not choices.is_given("cluster.device_memory_gb")
    if is_asked and (memory_gb := device_memory_gb()):
        reason = "nvidia-smi reports it for the smallest device"
        choices.take("cluster.device_memory_gb", memory_gb, reason)
    if isinstance(choices.settings, GRPOSettings):
        if num_devices and importlib.util.find_spec("vllm") is not None:
            choices.take("rollout.engine", "vllm", "vLLM is installed and there are accelerators")
        else:
            reason = "vLLM is not installed" if num_devices else "there are no accelerators"
            choices.take("rollout.engine", "hf", reason)


def _choose_groups(choices: _Choices) -> None:
    """Give each role its share of the devices, in numbers that its layout can use."""
    settings, cluster = choices.settings, choices.settings.cluster
    has_rollout = isinstance(settings, GRPOSettings)
    total = cluster.devices_per_node * cluster.num_nodes - sum(devices_apart(settings).values())
    if total < 1:
        return
    unit, size = max(1, settings.train.model_parallel_size), cluster.rollout_devices
    is_given = choices.is_given("cluster.rollout_instances")
    num_rollout = size * (cluster.rollout_instances if is_given else 1)
    if isinstance(settings, GRPOSettings):
        fits = unit + num_rollout <= total
        can_share = math.lcm(unit, size) <= total and not settings.rollout.staleness
        if total == 1 or (not fits and can_share):
            reason = "trainer and instances do not fit beside each other: they take turns"
            choices.take("cluster.placement", "colocated", reason)
    most, reason = total, "a rank for each device"
    if is_shared := has_rollout and choices.settings.cluster.placement == "colocated":
        unit = math.lcm(unit, size)
        if is_given:
            most, reason = num_rollout, "on the instances' devices"
    elif has_rollout:
        most, reason = min(total // 2, total - num_rollout), "up to half of the devices"
    if most < unit:
        reason = "the least for its layout"
    elif unit > 1:
        reason += f", in multiples of {unit}"
    choices.take("cluster.train_workers", max(unit, most - most % unit), reason)
    left, reason = choices.settings.cluster.train_workers, "on the trainers' devices"
    if not is_shared:
        left, reason = total - left, "the other devices"
    if has_rollout:
        choices.take("cluster.rollout_instances", max(1, left // size), reason)


def _choose_threads(choices: _Choices) -> None:
    """Let roles that alternate on one machine without accelerators each use all its cores."""
    settings = choices.settings
    cluster = settings.cluster
    if cluster.devices_per_node or cluster.num_nodes > 1 or cluster.address is not None:
        return
    cores = num_cores()
    alone = distillation(settings)[0].teacher_workers  # ranks like the trainer's, beside it
    workers = {"train": max(cluster.train_workers, alone)}
    if isinstance(settings, GRPOSettings):
        if settings.rollout.staleness:
            return
        workers["rollout"] = settings.num_instances  # judges work beside the others
    total = sum(workers.values()) + min(cluster.train_workers, alone)
    most, own = cores, os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    reason = f"the roles alternate on {cores} cores"
    if own.isdecimal() and int(own):
        most, reason = min(cores, int(own)), f"OMP_NUM_THREADS is {own}"
    for role, count in workers.items():
        if not choices.is_given(f"cluster.{role}_cpus", "cluster.env_vars.OMP_NUM_THREADS"):
            cpus = f"{cores} cores for {total} workers"
            choices.take(f"cluster.{role}_cpus", cores / total, cpus)
            choices.take(f"cluster.{role}_threads", max(1, most // count), reason)


def _choose_trackers(choices: _Choices) -> None:
    names = ["console"]
    if importlib.util.find_spec("tensorboard") is not None:
        names.append("tensorboard")
    # Without a key or a mode, wandb would stop the run to ask for a login.
    is_ready = any(map(os.environ.get, ("WANDB_API_KEY", "WANDB_MODE")))
    if is_ready and importlib.util.find_spec("wandb") is not None:
        names.append("wandb")
    choices.take("tracking.to", tuple(names), "the installed trackers")


def device_memory_gb() -> float:
    """Return the memory of this machine's smallest GPU in GB by nvidia-smi, or 0 if unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
        return round(min(map(float, ran.stdout.split())) * (1 << 20) / 1e9, 1)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a model's config.json that sizes depend on."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int = 0
    intermediate_size: int = 0
    head_dim: int | None = None

    @property
    def kv_width(self) -> int:
        """Number of elements of one token's keys, or values, in one layer."""
        head = self.head_dim or self.hidden_size // self.num_attention_heads
        return head * (self.num_key_value_heads or self.num_attention_heads)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of a decoder with gated feed-forward layers, embedding and head."""
        hidden, inner = self.hidden_size, self.intermediate_size or 4 * self.hidden_size
        layer = 2 * hidden * hidden + 2 * hidden * self.kv_width + 3 * hidden * inner
        return self.num_hidden_layers * layer + 2 * self.vocab_size * hidden


def read_shape(model: str) -> ModelShape | None:
    """Return the shape of the model in a folder, or None without a suitable config.json."""
    try:
        return msgspec.json.decode((Path(model) / "config.json").read_bytes(), type=ModelShape)
    except (OSError, msgspec.DecodeError):
        return None


def _choose_sizes(choices: _Choices) -> None:
    """Derive sizes from the model's shape and the memory, where both are known."""
    settings, cluster = choices.settings, choices.settings.cluster
    memory, source, width = cluster.device_memory_gb * 1e9, "a device", 2
    if not cluster.devices_per_node:
        rollouts = settings.num_instances if isinstance(settings, GRPOSettings) else 0
        memory = host_memory_bytes() / (cluster.train_workers + rollouts)
        source, width = "the host, for each worker", 4
    shape = read_shape(settings.model)
    if shape is None or not memory:
        return
    tokens, reason = _tokens(settings, shape, memory, source, width)
    choices.take("train.engine.max_tokens_per_micro_batch", tokens, reason)
    if isinstance(settings, GRPOSettings):
        in_flight, reason = _in_flight(settings, shape, memory, source, width)
        choices.take("rollout.max_in_flight", in_flight, reason)


def _tokens(
    settings: RunSettings, shape: ModelShape, memory: float, source: str, width: int
) -> tuple[int, str]:
    """Derive tokens per micro-batch: memory left by the state, over activations per token."""
    # But for the adapters, which are small; a critic is trained as a whole.
    has_critic = isinstance(settings, GRPOSettings) and settings.algorithm.preset == "ppo"
    is_frozen = settings.train.lora is not None and not has_critic
    per_parameter = width if is_frozen else _STATE_BYTES
    if settings.cluster.train_workers == 1 and per_parameter == _STATE_BYTES and width == 2:
        per_parameter += width  # one rank casts all of its parameters for a call
    state = per_parameter * shape.num_parameters / settings.cluster.train_workers
    kept = 2 * shape.hidden_size
    if not settings.train.engine.get("gradient_checkpointing"):
        kept = 12 * shape.hidden_size + 3 * (shape.intermediate_size or 4 * shape.hidden_size)
    per_token = width * shape.num_hidden_layers * kept + 8 * shape.vocab_size
    longest, fitting = settings.max_model_len, (_USABLE * memory - state) / per_token
    tokens = 1 << math.floor(math.log2(max(1.0, fitting)))
    tokens = max(longest, min(_MOST_TOKENS, tokens))
    reason = (
        f"({_USABLE:g} x {_gb(memory)} of {source} - {_gb(state)} of state) / {_kb(per_token)} of "
        f"a token, rounded down to a power of two, from {longest}, the longest sequence, to "
        f"{_MOST_TOKENS}"
    )
    return tokens, reason


def _in_flight(
    settings: GRPOSettings, shape: ModelShape, memory: float, source: str, width: int
) -> tuple[int, str]:
    """Derive requests in flight per instance: those of a step, limited by the KV cache."""
    devices, length = settings.cluster.rollout_devices, settings.max_model_len
    weights = width * shape.num_parameters / devices
    sequence = 2 * width * shape.num_hidden_layers * shape.kv_width * length / devices
    fitting = int((_USABLE * memory - weights) / sequence)
    requests = settings.prompts_per_step * settings.samples_per_prompt * settings.rollout.oversample
    asked = math.ceil(requests / settings.cluster.rollout_instances)
    value = max(1, min(asked, fitting, _MOST_IN_FLIGHT))
    reason = (
        f"the least of {asked} requests of a step, {fitting} = ({_USABLE:g} x {_gb(memory)} of "
        f"{source} - {_gb(weights)} of weights) / {_kb(sequence)} of cache for {length} tokens, "
        f"and {_MOST_IN_FLIGHT}"
    )
    return value, reason


def host_memory_bytes() -> int:
    """Return the available memory of this machine in bytes, or 0 if unknown."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields.get("MemAvailable", "0 kB").split()[0]) * 1024


def _gb(value: float) -> str:
    return f"{value / 1e9:.3g} GB"


def _kb(value: float) -> str:
    return f"{value / 1e3:.3g} kB"
