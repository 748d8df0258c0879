"""Presets of algorithms, and validation of settings."""

from __future__ import annotations

import math
import re
import typing
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from helmsman.api.environment import unfit
from helmsman.api.suggestions import did_you_mean
from helmsman.engines.train_config import LOSS_NAMES, TrainConfig
from helmsman.recipes.roles import ENGINES
from helmsman.recipes.settings import (
    AGENT_REWARD,
    DPOSettings,
    GRPOSettings,
    RunSettings,
    SFTSettings,
    name_of,
)

S = TypeVar("S", bound=RunSettings)
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"normalize_std": True, "aggregation": "sequence", "clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {
        "normalize_std": False,
        "aggregation": "constant",
        "clip_low": 0.2,
        "clip_high": 0.2,
    },
    "ppo": {"normalize_std": False, "aggregation": "token", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {
        "normalize_std": True,
        "aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "overlong_filter": True,
        "dynamic_sampling": True,
    },
}
_OFF = {"overlong_filter": False, "dynamic_sampling": False}

_LEAST: dict[str, float] = {
    **dict.fromkeys(
        (
            *(
                "steps",
                "prompts_per_step",
                "samples_per_prompt",
                "batch_size",
                "data.max_tokens",
                "cluster.num_nodes",
                "cluster.train_workers",
            ),
            *("cluster.rollout_instances", "cluster.rollout_devices", "train.minibatches"),
            *(
                "rollout.max_new_tokens",
                "rollout.max_in_flight",
                "rollout.oversample",
                "data.max_prompt_tokens",
            ),
            *(
                "algorithm.max_filtered_batches",
                "sync.bucket_mb",
                "check.prompts",
                "check.max_new_tokens",
            ),
            *("evaluation.max_new_tokens", "checkpoints.every", "checkpoints.keep"),
        ),
        1,
    ),
    **dict.fromkeys(
        (
            *("seed", "cluster.devices_per_node", "cluster.train_cpus", "cluster.rollout_cpus"),
            *(
                "cluster.train_mem",
                "cluster.rollout_mem",
                "cluster.train_threads",
                "cluster.rollout_threads",
                "cluster.device_memory_gb",
                "tracking.samples",
                "tracking.show_samples_every",
                "train.lr",
                "train.lr_end",
            ),
            *(
                "rollout.temperature",
                "rollout.top_k",
                "rollout.staleness",
                "data.num_held_out",
                "algorithm.clip_low",
                "algorithm.clip_high",
            ),
            *(
                "algorithm.overlong_buffer",
                "algorithm.overlong_penalty",
                "algorithm.kl_coef",
                "check.tolerance",
            ),
            *(
                "evaluation.every",
                "evaluate_every",
                "critic.lr",
                "critic.gamma",
                "critic.lam",
                "critic.clip",
                "beta",
                "evaluation.samples",
                "evaluation.temperature",
                "checkpoints.max_recoveries",
            ),
        ),
        0,
    ),
}
_TIMES = (
    "cluster.start_timeout_s",
    "cluster.engine_timeout_s",
    "cluster.call_timeout_s",
    "rollout.episode_timeout",
)
_GIVEN_ELSEWHERE = {"model": "model", "lr": "train.lr", "seed": "seed"}
"""Fields of the trainer's engine that are set by other settings of the run."""


def resolve(settings: S) -> S:
    """Fill in the values of the preset, and validate the settings.

    Raises:
        ValueError: A setting is invalid; the message names the key.
    """
    _check_numbers(msgspec.to_builtins(settings), "")
    for path, least in _LEAST.items():
        value = _get(settings, path)
        if value is not None and value < least:
            raise ValueError(f"{path} is {value}; expected {least:g} or more")
    for path in _TIMES:
        value = _get(settings, path)
        if value is not None and not value > 0:
            raise ValueError(f"{path} is {value:g}; expected more than 0")
    for name, text in settings.cluster.env_vars.items():
        if found := unfit(name, text):
            raise ValueError(f"cluster.env_vars[{name!r}] is {found[0]!r}; expected {found[1]}")
    # Workers may have another working directory, so make the path absolute.
    settings = msgspec.structs.replace(settings, model=str(Path(settings.model).absolute()))
    _check_train(settings)
    _check_data(settings)
    if (
        isinstance(settings, SFTSettings | DPOSettings)
        and settings.batch_size % settings.train.minibatches
    ):
        raise ValueError(
            f"train.minibatches is {settings.train.minibatches}, which does not divide batch_size, "
            f"{settings.batch_size}"
        )
    if isinstance(settings, GRPOSettings):
        given = msgspec.structs.asdict(settings.algorithm)
        preset = {**_OFF, **PRESETS[settings.algorithm.preset]}
        missing = {name: preset[name] for name, value in given.items() if value is None}
        filled = msgspec.structs.replace(settings.algorithm, **missing)
        settings = msgspec.structs.replace(settings, algorithm=filled)
        for check in (_check_cluster, _check_rewards, _check_rest):
            check(settings)
    return settings


def _get(settings: RunSettings, path: str) -> Any:
    """Return the value of a dotted key, or None if these settings do not have it."""
    try:
        return attrgetter(path)(settings)
    except AttributeError:
        return None


def told(error: msgspec.ValidationError, kind: type[msgspec.Struct], section: str = "") -> str:
    """Format a validation error as key and reason, with the expected values."""
    reason, _, at = str(error).partition(" - at `$.")
    at = at.rstrip("`")
    if reason.startswith("Invalid enum value"):
        reason += f"; expected {' or '.join(map(repr, _choices(kind, at)))}"
    elif (found := re.search(r"unknown field `(.*)`", reason)) and not at:
        reason += f"; {did_you_mean(found[1], kind.__struct_fields__)}"
    key = ".".join(filter(None, (section, at)))
    return f"{key}: {reason}" if key else reason


def _choices(kind: Any, path: str) -> list[Any]:
    """Return the allowed values of a setting whose type is a Literal."""
    for part in path.split("."):
        name, is_item, _ = part.partition("[")
        kind = typing.get_type_hints(kind)[name]
        kind = typing.get_args(kind)[0] if is_item else kind
    alternatives = [kind] if typing.get_origin(kind) is Literal else typing.get_args(kind)
    return [
        value
        for each in alternatives
        if typing.get_origin(each) is Literal
        for value in typing.get_args(each)
    ]


def _check_numbers(value: Any, key: str) -> None:
    """Reject numbers that settings.json cannot hold: NaN, infinity, more than 64 bits."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_numbers(each, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _check_numbers(each, f"{key}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} is {value}; expected a finite number")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{key} is {value}; expected a number of at most 64 bits")


def _check_train(settings: RunSettings) -> None:
    if taken := _GIVEN_ELSEWHERE.keys() & settings.train.engine.keys():
        name = min(taken)
        raise ValueError(
            f"train.engine.{name} cannot be set here; set {_GIVEN_ELSEWHERE[name]} instead"
        )
    try:
        msgspec.convert({"model": settings.model, **settings.train.engine}, TrainConfig)
    except msgspec.ValidationError as error:
        raise ValueError(told(error, TrainConfig, "train.engine")) from error


def _check_data(settings: RunSettings) -> None:
    data = settings.data
    for key in ("held_out", "held_out_split"):
        if getattr(data, key) is not None and data.num_held_out:
            raise ValueError(
                f"data.{key} and data.num_held_out are both given; expected one of them"
            )
    cluster = settings.cluster
    shared_by = settings.train.model_parallel_size
    if shared_by < 1 or cluster.train_workers % shared_by:
        raise ValueError(
            f"train.engine has tensor_parallel_size x context_parallel_size of {shared_by}, which "
            "does not divide "
            f"cluster.train_workers, {cluster.train_workers}"
        )
    if cluster.scheduler != "ray" and cluster.num_nodes > 1:
        raise ValueError(
            f"cluster.num_nodes is {cluster.num_nodes}, which requires cluster.scheduler 'ray'"
        )
    if cluster.scheduler == "inline" and cluster.train_workers > 1:
        raise ValueError(
            "cluster.scheduler 'inline' runs one rank of each model, in the script's process; "
            f"expected cluster.train_workers 1, not {cluster.train_workers}"
        )


def _check_cluster(settings: GRPOSettings) -> None:
    cluster, rollout = settings.cluster, settings.rollout
    if cluster.rollout_spans_nodes:
        spans = (
            f"cluster.rollout_devices is {cluster.rollout_devices}, more than "
            f"cluster.devices_per_node, {cluster.devices_per_node}, so that an instance spans nodes"
        )
        if rollout.engine != "vllm":
            raise ValueError(f"{spans}; expected rollout.engine 'vllm', not {rollout.engine!r}")
        if settings.sync.way not in ("collective", "disk"):
            raise ValueError(
                f"{spans}; sync.way {settings.sync.way!r} reaches only one of these nodes, "
                "use 'collective' or 'disk'"
            )
    if cluster.placement == "colocated":
        num_devices = cluster.rollout_instances * cluster.rollout_devices
        if cluster.takes_turns and num_devices != cluster.train_workers:
            raise ValueError(
                f"cluster.rollout_instances x rollout_devices is {num_devices}; expected "
                f"cluster.train_workers, {cluster.train_workers}, because the rollout uses the "
                "trainer's devices with cluster.placement 'colocated'"
            )
        if rollout.staleness:
            raise ValueError(
                f"rollout.staleness is {rollout.staleness:g} with cluster.placement 'colocated', "
                "where nothing is generated "
                "while the trainer works; expected 0, or placement 'separated'"
            )
        if settings.sync.way == "collective":
            raise ValueError(
                "sync.way is 'collective', which needs one device per member; trainer and rollout "
                "share devices with cluster.placement 'colocated'. Use 'auto'"
            )
        if settings.sync.in_flight == "abort":
            raise ValueError(
                "sync.in_flight is 'abort'; expected 'keep', because no request is in flight "
                "during a weight sync with cluster.placement 'colocated'"
            )


def _check_rewards(settings: GRPOSettings) -> None:
    names = [name_of(reward) for reward in settings.rewards]
    agent = settings.agent
    if agent.use and agent.command:
        raise ValueError("agent.use and agent.command are both given; expected one of them")
    if agent.is_given and names:
        raise ValueError("rewards and agent are both given; expected one, as agents return rewards")
    if agent.is_given:
        names = [AGENT_REWARD]
        if agent.credit == "turn" and settings.algorithm.preset == "ppo":
            raise ValueError("agent.credit is 'turn'; expected 'session' with a critic")
        if settings.algorithm.overlong_buffer:
            raise ValueError(
                "algorithm.overlong_buffer is for single answers; use agent.max_tokens and "
                "agent.truncated_reward for the sessions of an agent"
            )
    if not names:
        raise ValueError("rewards is empty; expected at least one, such as [exact], or an agent")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two rewards are called {min(twice)!r}; give each a name of its own")
    for index, reward in enumerate(settings.rewards):
        if reward.processes < 1 or not reward.timeout_s > 0:
            raise ValueError(
                f"rewards[{index}] needs processes of 1 or more, and a timeout_s above 0"
            )
    right = settings.evaluation.reward
    if right is not None and right not in names:
        raise ValueError(f"evaluation.reward is {right!r}; the rewards are {', '.join(names)}")


def _check_rest(settings: GRPOSettings) -> None:
    evaluation, algorithm = settings.evaluation, settings.algorithm
    for section, found in (("rollout", settings.rollout), ("evaluation", evaluation)):
        if not 0 < found.top_p <= 1:
            raise ValueError(
                f"{section}.top_p is {found.top_p:g}; expected more than 0 and at most 1"
            )
    engine = settings.rollout.engine
    if engine not in ENGINES and "." not in engine:
        raise ValueError(
            f"rollout.engine is {engine!r}; expected {', '.join(ENGINES)}, or a class's import path"
        )
    if "." not in algorithm.loss and algorithm.loss not in LOSS_NAMES:
        raise ValueError(
            f"algorithm.loss is {algorithm.loss!r}; expected {', '.join(LOSS_NAMES)}, or a "
            "function's import path"
        )
    if evaluation.samples and not all(1 <= k <= evaluation.samples for k in evaluation.k):
        raise ValueError(
            f"evaluation.k is {list(evaluation.k)}; expected 1 to evaluation.samples, "
            f"{evaluation.samples}"
        )
    if settings.prompts_per_step % settings.train.minibatches:
        raise ValueError(
            f"train.minibatches is {settings.train.minibatches}, which does not divide "
            "prompts_per_step, "
            f"{settings.prompts_per_step}"
        )
    if settings.samples_per_prompt < 2 and algorithm.preset != "ppo":
        raise ValueError(
            "samples_per_prompt is 1; expected 2 or more, since answers are compared with each "
            "other"
        )
    if algorithm.overlong_buffer > settings.rollout.max_new_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer is {algorithm.overlong_buffer}; expected at most "
            f"rollout.max_new_tokens, {settings.rollout.max_new_tokens}"
        )
