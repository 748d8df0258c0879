"""Defaults that depend on the machine: scheduler, engine, group sizes, threads, trackers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from typing import Any, TypeVar

import msgspec

from helmsman import LocalScheduler
from helmsman.recipes.settings import GRPOSettings, RunSettings
from helmsman.recipes.sizes import sizes

S = TypeVar("S", bound=RunSettings)

CHOSEN = frozenset(
    {
        *(
            "cluster.scheduler",
            "cluster.devices_per_node",
            "cluster.placement",
            "cluster.train_workers",
        ),
        *(
            "cluster.rollout_instances",
            "cluster.train_cpus",
            "cluster.rollout_cpus",
            "cluster.train_threads",
        ),
        *(
            "cluster.rollout_threads",
            "cluster.device_memory_gb",
            "rollout.engine",
            "rollout.max_in_flight",
        ),
        "tracking.to",
    }
)
"""Settings whose default depends on the machine."""


class Choice(msgspec.Struct, frozen=True):
    """A chosen setting with its reason."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value} ({self.reason})"


class _Choices:
    """Settings, and the choices made for them so far."""

    def __init__(self, settings: RunSettings, given: frozenset[str]) -> None:
        self.settings, self._given, self.made = settings, given, list[Choice]()

    def is_given(self, *keys: str) -> bool:
        return any(key in self._given for key in keys)

    def take(self, key: str, value: Any, reason: str) -> None:
        """Choose a value, unless the user has set it."""
        if self.is_given(key):
            return
        section, _, name = key.partition(".")
        if not name:
            self.settings = msgspec.structs.replace(self.settings, **{key: value})
            self.made.append(Choice(key, value, reason))
            return
        found = getattr(self.settings, section)
        below, _, entry = name.partition(".")
        if entry:  # an entry of a mapping, such as train.engine
            name, value = below, {**getattr(found, below), entry: value}
        self.settings = msgspec.structs.replace(
            self.settings, **{section: msgspec.structs.replace(found, **{name: value})}
        )
        self.made.append(Choice(key, value[entry] if entry else value, reason))


def choose(settings: S, given: frozenset[str]) -> tuple[S, list[Choice]]:
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
    for key, value, reason in sizes(choices.settings):
        choices.take(key, value, reason)
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
    if choices.settings.cluster.devices_per_node and not choices.is_given(
        "cluster.device_memory_gb"
    ):
        memory_gb = device_memory_gb()
        if memory_gb:
            choices.take(
                "cluster.device_memory_gb",
                memory_gb,
                "nvidia-smi reports it for the smallest device",
            )
    settings = choices.settings
    if isinstance(settings, GRPOSettings):
        has_vllm = importlib.util.find_spec("vllm") is not None
        if settings.cluster.devices_per_node and has_vllm:
            choices.take("rollout.engine", "vllm", "vLLM is installed and there are accelerators")
        else:
            missing = (
                "vLLM is not installed"
                if settings.cluster.devices_per_node
                else "there are no accelerators"
            )
            choices.take("rollout.engine", "hf", missing)


def _choose_groups(choices: _Choices) -> None:
    """Give each role its share of the devices."""
    cluster = choices.settings.cluster
    total = cluster.devices_per_node * cluster.num_nodes
    if not isinstance(choices.settings, GRPOSettings):
        if total:
            choices.take("cluster.train_workers", total, "a rank for each device")
        return
    if not total:
        return
    if total == 1:
        choices.take(
            "cluster.placement", "colocated", "trainer and instance take turns on one device"
        )
    if choices.settings.cluster.placement == "colocated":
        choices.take("cluster.train_workers", total, "a rank for each device")
        workers = choices.settings.cluster.train_workers
        choices.take(
            "cluster.rollout_instances",
            workers // cluster.rollout_devices,
            "on the trainers' devices",
        )
    else:
        choices.take("cluster.train_workers", total // 2, "half of the devices")
        left = total - choices.settings.cluster.train_workers
        choices.take(
            "cluster.rollout_instances",
            max(1, left // cluster.rollout_devices),
            "the other devices",
        )


def _choose_threads(choices: _Choices) -> None:
    """Let roles that alternate on one machine without accelerators each use all its cores."""
    settings = choices.settings
    cluster = settings.cluster
    if cluster.devices_per_node or cluster.num_nodes > 1 or cluster.address is not None:
        return
    cores = num_cores()
    workers = {"train": cluster.train_workers}
    if isinstance(settings, GRPOSettings):
        if settings.rollout.staleness:
            return
        workers["rollout"] = cluster.rollout_instances
    share = cores / sum(workers.values())
    most, own = cores, os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    reason = f"the roles alternate on {cores} cores"
    if own.isdecimal() and int(own):
        most, reason = min(cores, int(own)), f"OMP_NUM_THREADS is {own}"
    for role, count in workers.items():
        if choices.is_given(f"cluster.{role}_cpus", "cluster.env_vars.OMP_NUM_THREADS"):
            continue
        choices.take(
            f"cluster.{role}_cpus", share, f"{cores} cores for {sum(workers.values())} workers"
        )
        choices.take(f"cluster.{role}_threads", max(1, most // count), reason)


def _choose_trackers(choices: _Choices) -> None:
    names = ["console"]
    if importlib.util.find_spec("tensorboard") is not None:
        names.append("tensorboard")
    # Without a key or a mode, wandb would stop the run to ask for a login.
    if importlib.util.find_spec("wandb") is not None and any(
        map(os.environ.get, ("WANDB_API_KEY", "WANDB_MODE"))
    ):
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
