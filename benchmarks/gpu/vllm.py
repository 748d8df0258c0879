"""vLLM on the device of a trainer: speed, weight updates, sleep, and requests over an update.

One start serves all checks but the last: a trainer, an instance that keeps requests over an update,
one that computes them again, and a bare vLLM in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.bare_vllm import rate_of
from benchmarks.gpu.harness import Machine, UnmetNeedError, check
from benchmarks.gpu.memory import PROBE
from benchmarks.gpu.rollouts import difference
from benchmarks.gpu.training import samples_of, training
from helmsman import Job, RolloutController, SamplingParams, SchedulingStrategy, WeightSync
from helmsman.api.generation import InFlight
from helmsman.engines.vllm_config import VLLMConfig
from helmsman.recipes.tiny_model import make_model
from helmsman.weights import ViaDevice, ViaDisk, ViaMemory

VLLM = "helmsman.engines.vllm_engine.VLLMEngine"
_FORWARD_S = 60.0
"""Limit of a forward pass; the stacks of the run are printed after a quarter of it."""
_CACHE_BYTES = 6 << 30
_CONCURRENCY = 256
_LEAST_RATIO = 0.95
_LONG = 400
"""Tokens of a request that is in flight at an update."""
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


class Stage:
    """A trainer, vLLM instances on its device, and a bare vLLM that waits until it is asked."""

    def __init__(self, machine: Machine, stack: contextlib.ExitStack) -> None:
        self.machine, self._stack = machine, stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.dtype = "float32" if machine.is_rehearsal else "bfloat16"
        self._write_model()
        started = time.monotonic()
        model: dict[str, Any] = {"model": str(self.folder / "model"), "compute_dtype": self.dtype}
        self.trainer = stack.enter_context(training(machine, 1, **model))
        asyncio.run(machine.scheduler.create_engine("train/0", PROBE, "memory"))
        self.bare = self._start_bare()
        self.rollout, self.recomputing = self._rollout("rollout"), self._rollout("recompute")
        with ThreadPoolExecutor() as threads:
            self.forward_first = threads.submit(lambda: [self.forward(), self.forward()])
            starts = [threads.submit(each.initialize) for each in (self.rollout, self.recomputing)]
            for each in starts:
                each.result()
        self.seconds_to_start = time.monotonic() - started

    def _write_model(self) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        model = self.machine.model
        if self.machine.is_rehearsal:
            model = {**model, "hidden_size": 128}  # vLLM has no kernel for heads of 16 there
        torch.manual_seed(0)
        config = AutoConfig.for_model(**model)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
            self.folder / "model"
        )

    def _config(self, role: str) -> VLLMConfig:
        is_rehearsal = self.machine.is_rehearsal
        on_device = {
            # By hand, since vLLMs that start together would measure one another's memory.
            "kv_cache_memory_bytes": _CACHE_BYTES,
            # No compilation, which takes minutes on a slow host, but graphs for all sizes.
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256],
            },
        }
        return VLLMConfig(
            model=str(self.folder / "model"),
            dtype=self.dtype,
            max_model_len=512,
            max_concurrency=16 if is_rehearsal else _CONCURRENCY,
            gpu_memory_utilization=0.15,
            enforce_eager=is_rehearsal or role == "recompute",
            enable_sleep_mode=not is_rehearsal and role == "rollout",
            in_flight="recompute" if role == "recompute" else None,
            engine_args={} if is_rehearsal else on_device,
        )

    def _rollout(self, role: str) -> RolloutController:
        spec = self.machine.spec()
        spec = msgspec.structs.replace(spec, env_vars={**_ENVIRONMENT, **spec.env_vars})
        beside = SchedulingStrategy(type="colocation", target="train", fork=True)
        rollout = RolloutController(
            self.machine.scheduler,
            VLLM,
            Job(role=role, replicas=1, tasks=[spec], scheduling_strategy=beside),
            engine_kwargs={"config": self._config(role)},
            max_in_flight_per_worker=_CONCURRENCY,
        )
        self._stack.callback(rollout.close)
        return rollout

    def _start_bare(self) -> subprocess.Popen[str]:
        bare = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.bare_vllm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
            start_new_session=True,
        )
        self._stack.callback(_end, bare)
        config = self._config("bare")
        arguments = {
            "model": config.model,
            "skip_tokenizer_init": True,
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_concurrency,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enforce_eager": config.enforce_eager,
            **config.engine_args,
        }
        _send(bare, arguments)
        return bare

    def ask_bare(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Return the tokens per second of the bare vLLM, which ends afterwards."""
        _send(self.bare, {"prompts": prompts, "new_tokens": new_tokens})
        assert self.bare.stdin is not None and self.bare.stdout is not None
        self.bare.stdin.close()
        for line in self.bare.stdout:
            if line.startswith("{"):
                return float(json.loads(line)["rate"])
        raise RuntimeError(f"the bare vLLM ended with exit code {self.bare.wait()}; see above")

    def prompts(self, count: int, seed: int = 1) -> list[list[int]]:
        """Return random prompts of up to 64 tokens."""
        vocab = int(self.machine.model["vocab_size"])
        return [list(each["input_ids"]) for each in samples_of(count, 64, vocab, seed)]

    def forward(self) -> float:
        """Return the seconds of a forward pass of the trainer."""
        samples = [{"input_ids": prompt} for prompt in self.prompts(8)]
        started = time.monotonic()
        with _explained(self.machine, _FORWARD_S / 4):
            self.trainer.forward(samples, timeout=_FORWARD_S)
        return time.monotonic() - started

    def differ(self) -> float:
        """Return the mean difference of log-probabilities of the instance and the trainer."""
        return difference(self.trainer, self.rollout, self.prompts(16), 8)[1]

    def step(self) -> None:
        """Change the weights by two steps."""
        for prompts in (self.prompts(8, seed) for seed in (7, 8)):
            self.trainer.train_batch([{"input_ids": each} for each in prompts], "sft")

    def free_bytes(self) -> int:
        """Return the free memory of the device."""
        found = self.machine.scheduler.call_engine("train/0", "figures", "memory")
        return int(found.free_bytes)


_STAGES: dict[Machine, Stage | str] = {}
"""The stage of a machine, or why it did not start."""


def stage_of(machine: Machine) -> Stage:
    """Return the stage; the first check that needs it starts it."""
    require_vllm(machine)
    if machine not in _STAGES:
        with contextlib.ExitStack() as stack:
            _STAGES[machine] = "its start failed"
            _STAGES[machine] = Stage(machine, stack)
            machine.closing.push(stack.pop_all())
            machine.closing.callback(_STAGES.pop, machine)
    stage = _STAGES[machine]
    if isinstance(stage, str):
        raise RuntimeError(f"there is no vLLM to check: {stage}; see above")
    return stage


def require_vllm(machine: Machine) -> None:
    """Raise UnmetNeedError without vLLM, or without a device."""
    if importlib.util.find_spec("vllm") is None:
        raise UnmetNeedError("vLLM is not installed: pip install 'helmsman-rl[vllm]'")
    machine.require(1, "vLLM beside a trainer")


@check("vllm.forward_beside")
def forward_beside(machine: Machine) -> dict[str, str]:
    """A trainer's forward pass returns beside a running vLLM on its device."""
    stage = stage_of(machine)
    first = stage.forward_first.result()
    stage.rollout.generate(stage.prompts(8), SamplingParams(max_new_tokens=16))
    beside = [stage.forward(), stage.forward()]
    return {
        "start": f"{stage.seconds_to_start:.0f} s",
        "forward while vLLM starts": _seconds(first),
        "beside vLLM": _seconds(beside),
    }


@check("vllm.speed")
def speed(machine: Machine) -> dict[str, str]:
    """An instance generates at least 0.95 of the tokens per second of the bare vLLM."""
    stage = stage_of(machine)
    count, new_tokens = (4, 4) if machine.is_rehearsal else (_CONCURRENCY, 128)
    prompts, sampling = stage.prompts(count, seed=3), SamplingParams(max_new_tokens=new_tokens)

    def generate() -> int:
        return sum(len(each.token_ids) for each in stage.rollout.generate(prompts, sampling))

    ours = rate_of(generate)
    theirs = stage.ask_bare(prompts, new_tokens)
    ours = max(ours, rate_of(generate))
    figures = {
        "requests": f"{count} of {new_tokens} tokens",
        "tokens/s": f"{ours:,.0f}",
        "bare vLLM": f"{theirs:,.0f}",
        "ratio": f"{ours / theirs:.2f}",
    }
    assert machine.is_rehearsal or ours / theirs >= _LEAST_RATIO, figures
    return figures


@check("vllm.sleep")
def sleep(machine: Machine) -> dict[str, str]:
    """Sleep frees the device's memory, and the instance then agrees with the trainer again."""
    stage = stage_of(machine)
    rollout, sync = stage.rollout, WeightSync(stage.trainer, stage.rollout, ViaDevice())
    sync.push()
    awake = stage.differ()
    figures = {"difference before": f"{awake:.1e}"}
    for level in (1, 2):
        before, started = stage.free_bytes(), time.monotonic()
        rollout.sleep(level)
        slept, freed = time.monotonic(), stage.free_bytes() - before
        woke = time.monotonic()
        if level == 2:
            rollout.wake(weights_only=True)
            sync.push()
        rollout.wake()
        awake_s = time.monotonic() - woke
        after = stage.differ()
        figures[f"level {level}"] = (
            f"{freed / 2**30:.2f} GiB freed in {slept - started:.2f} s, awake in {awake_s:.2f} s, "
            f"difference {after:.1e}"
        )
        assert _agree(after, awake), figures
        assert machine.is_rehearsal or freed > _CACHE_BYTES, figures
    return figures


@check("vllm.updates")
def updates(machine: Machine) -> dict[str, str]:
    """After updates by device, memory and disk the instance agrees with the trainer."""
    stage = stage_of(machine)
    figures = {}
    disk = ViaDisk(str(stage.folder / "weights"))
    for name, way in {"device": ViaDevice(), "memory": ViaMemory(), "disk": disk}.items():
        sync = WeightSync(stage.trainer, stage.rollout, way)
        sync.push()  # connects, and maps memory
        before = stage.differ()
        stage.step()
        stale = stage.differ()
        report = sync.push()
        fresh = stage.differ()
        figures[name] = (
            f"{report.num_bytes / 2**20:.0f} MiB in {1e3 * report.seconds:.0f} ms, difference "
            f"{before:.1e} before, {stale:.1e} stale, {fresh:.1e} fresh"
        )
        assert _agree(fresh, before) and stale > 2 * fresh, figures
        fallback = getattr(way, "fallback_reason", None)
        assert not fallback, fallback
    return figures


@check("vllm.requests_over_update")
def requests_over_update(machine: Machine) -> dict[str, str]:
    """Requests in flight at an update end whole, with tokens of both versions, whether they are
    aborted and continued elsewhere, kept with their cache, or computed again.
    """
    stage = stage_of(machine)
    ways: dict[str, tuple[RolloutController, InFlight]] = {
        "abort": (stage.rollout, "abort"),
        "continue": (stage.rollout, "keep"),
        "recompute": (stage.recomputing, "keep"),
    }
    figures = {}
    for name, (rollout, in_flight) in ways.items():
        sync = WeightSync(stage.trainer, rollout, ViaDevice(), in_flight=in_flight)
        old = sync.push().version
        stage.step()
        prompts = stage.prompts(8, seed=5)
        with ThreadPoolExecutor(1) as thread:
            pending = thread.submit(
                rollout.generate, prompts, SamplingParams(max_new_tokens=_LONG, seed=1)
            )
            _wait_until_running(rollout, len(prompts))
            report = sync.push()
            results = pending.result()
        for result in results:
            versions = list(result.versions)
            assert len(result.token_ids) == len(result.logprobs) == len(versions) == _LONG, name
            assert set(versions) == {old, report.version}, (name, versions)
            assert versions == sorted(versions), (name, versions)
        shares = [result.versions.count(old) for result in results]
        figures[name] = (
            f"{min(shares)} to {max(shares)} of {_LONG} tokens before the update, which took "
            f"{1e3 * report.seconds:.0f} ms"
        )
    return figures


def _wait_until_running(rollout: RolloutController, num_requests: int) -> None:
    """Wait until so many requests have a token."""
    deadline = time.monotonic() + _FORWARD_S
    while time.monotonic() < deadline:
        stats = rollout.scheduler.call_engine(rollout.workers[0].id, "stats", rollout.engine_name)
        if stats["num_running"] == num_requests:
            return
        time.sleep(0.002)
    raise TimeoutError(f"{num_requests} requests did not begin within {_FORWARD_S:.0f} s")


@check("vllm.turns")
def turns(machine: Machine) -> dict[str, str]:
    """`helmsman grpo` trains by turns with vLLM on one device, and each update is checked."""
    require_vllm(machine)
    machine.closing.close()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", num_layers=2, width=256)
        (folder / "digits.py").write_text(_REWARD)
        rows = [json.dumps({"prompt": f"{number}+{number}="}) for number in range(50)]
        (folder / "sums.jsonl").write_text("\n".join(rows))
        engine: dict[str, Any] = {"enforce_eager": True}
        if not machine.is_rehearsal:
            engine |= {"gpu_memory_utilization": 0.1}
            engine |= {"engine_args": {"kv_cache_memory_bytes": 1 << 30}}
        settings = {
            "model": str(folder / "model"),
            "data.train": str(folder / "sums.jsonl"),
            "data.max_prompt_tokens": "64",
            "rewards": json.dumps([{"use": f"{folder / 'digits.py'}:digits"}]),
            "out": str(folder / "out"),
            "steps": "3",
            "prompts_per_step": "8",
            "samples_per_prompt": "4",
            "train.lr": "3e-3",
            "rollout.engine": "vllm",
            "rollout.engine_args": json.dumps(engine),
            "rollout.max_new_tokens": "12",
            "rollout.max_in_flight": "32",
            "cluster.scheduler": "local",
            "cluster.placement": "colocated",
            "cluster.train_workers": "1",
            "cluster.rollout_instances": "1",
            "cluster.train_cpus": "0.5",
            "cluster.rollout_cpus": "0.5",
            "check.tolerance": "1e-3" if machine.is_rehearsal else "0.1",
            "evaluation.every": "0",
            "checkpoints.export": "none",
            **({"cluster.devices_per_node": "0"} if machine.is_rehearsal else {}),
        }
        flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
        started = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "helmsman", "grpo", "--check-weights", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(),
        )
        seconds = time.monotonic() - started
        print(ended.stdout, file=sys.stderr)
        assert ended.returncode == 0, f"exit code {ended.returncode}; see its output above"
        lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if "check/max_diff" in each]
    assert len(steps) >= 3, lines
    return {
        "updates checked": str(len(steps)),
        "largest difference": f"{max(each['check/max_diff'] for each in steps):.1e}",
        "all of it": f"{seconds:.0f} s",
    }


_REWARD = """
def digits(completion):
    return sum(map(str.isdigit, completion)) / max(1, len(completion))
"""


def _agree(after: float, before: float) -> bool:
    """Return whether a mean difference is one of rounding, like the one before."""
    return after < 2 * before + 1e-3


def _seconds(figures: Sequence[float]) -> str:
    return ", ".join(f"{each:.2f} s" for each in figures)


@contextlib.contextmanager
def _explained(machine: Machine, after_s: float) -> Iterator[None]:
    """Print the diagnosis and the stacks of the run if the block has not ended in time."""

    def explain() -> None:
        print(f"a call has not returned after {after_s:.0f} s", file=sys.stderr, flush=True)
        for command in (["why"], ["stacks", "--all"]):
            subprocess.run(
                [sys.executable, "-m", "helmsman", *command, machine.scheduler.run_id],
                stdout=sys.stderr,
                timeout=_FORWARD_S,
            )

    timer = threading.Timer(after_s, explain)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _environment() -> dict[str, str]:
    return {**_ENVIRONMENT, **os.environ}


def _send(bare: subprocess.Popen[str], order: dict[str, Any]) -> None:
    assert bare.stdin is not None
    bare.stdin.write(json.dumps(order) + "\n")
    bare.stdin.flush()


def _end(bare: subprocess.Popen[str]) -> None:
    """Kill the bare vLLM with the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(bare.pid, signal.SIGKILL)
    bare.wait()
