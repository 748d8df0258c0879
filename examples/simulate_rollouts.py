"""Compare routing policies on simulated rollout instances: the duration of a batch, the gain of
prefix caches and the cost of failures.

    python examples/simulate_rollouts.py --instances 64 --prompts 512 --samples 8 \\
        --stragglers 0.05 --failures 3

The scheduler is Helmsman's own, on a virtual clock; only the engines are simulated. It prints a
table and draws the requests in flight over time.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.api.scheduler import PreemptionNotice, WorkerHealth
from helmsman.api.supervision import Monitor
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.health import SupervisionPolicy
from helmsman.controller._rollout.request import RequestOptions
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.controller._rollout.routing import (
    LeastOutstandingTokens,
    PrefixAffinity,
    RoundRobin,
    RoutingPolicy,
)
from helmsman.controller._rollout.supervisor import Supervisor
from helmsman.testing import EngineModel, SimulatedBackend, SimulatedInstance, run_virtually

POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "least outstanding tokens": LeastOutstandingTokens,
    "round-robin": RoundRobin,
    "prefix affinity": PrefixAffinity,
}
_SHARED_PREFIXES = 16
"""Number of system prompts; each prompt begins with one of them."""
FLAGS: list[tuple[str, int | float, str]] = [
    ("--instances", 64, "rollout instances"),
    ("--capacity", 64, "requests that an instance takes at once"),
    ("--prompts", 512, "prompts of the batch"),
    ("--samples", 8, "samples of each prompt"),
    ("--mean-tokens", 1000.0, "mean length of a sample"),
    ("--sigma", 1.0, "spread of the lengths' logarithm"),
    ("--max-tokens", 16_384, "longest sample"),
    ("--prompt-tokens", 256, "tokens of a prompt after its system prompt"),
    ("--prefix-tokens", 1024, f"tokens of each of the {_SHARED_PREFIXES} system prompts"),
    ("--cache-tokens", 65_536, "prompt tokens that the cache of an instance holds"),
    ("--stragglers", 0.0, "fraction of instances that are slow"),
    ("--slowdown", 3.0, "how many times slower these are"),
    ("--failures", 0, "instances that are killed while they run"),
    ("--rebuild-s", 30.0, "virtual seconds until a killed instance is back"),
    ("--seed", 0, "seed of workload and failures"),
]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a policy; times are in virtual seconds."""

    policy: str
    makespan_s: float
    bound_s: float
    """Lower bound of all policies: all work over all capacity, or the longest request alone."""
    cached: float
    """Share of the prompt tokens found in prefix caches."""
    p95_s: float
    """Time in which 95 of 100 requests ended."""
    num_repeated_tokens: int
    """Tokens generated again after the loss of an instance."""
    running: list[tuple[float, int]]
    """(time, requests in flight)."""


class Workload(msgspec.Struct, frozen=True):
    """The requests of a step, and their lengths."""

    requests: list[GenerationRequest]
    lengths: dict[str, int]


def make_workload(options: argparse.Namespace) -> Workload:
    """Make groups of samples of one prompt, with similar lengths; prompts begin with one of a few
    system prompts.
    """
    drawn = random.Random(options.seed)
    prefixes = [
        [drawn.randrange(32_000) for _ in range(options.prefix_tokens)]
        for _ in range(_SHARED_PREFIXES)
    ]
    requests, lengths = [], {}
    for prompt in range(options.prompts):
        tokens = [
            *drawn.choice(prefixes),
            *(drawn.randrange(32_000) for _ in range(options.prompt_tokens)),
        ]
        mu = math.log(options.mean_tokens) - options.sigma**2 / 2
        usual = drawn.lognormvariate(mu, options.sigma)
        for sample in range(options.samples):
            request_id = f"{prompt}-{sample}"
            length = int(usual * drawn.lognormvariate(0.0, 0.25))
            lengths[request_id] = max(1, min(options.max_tokens, length))
            sampling = SamplingParams(max_new_tokens=options.max_tokens)
            requests.append(
                GenerationRequest(request_id=request_id, prompt_ids=tokens, sampling=sampling)
            )
    return Workload(requests, lengths)


async def simulate(
    name: str, policy: RoutingPolicy, workload: Workload, options: argparse.Namespace
) -> Figures:
    """Run the workload under a policy."""
    loop, drawn = asyncio.get_running_loop(), random.Random(options.seed)
    model = EngineModel(cached_tokens=options.cache_tokens)
    slow = msgspec.structs.replace(model, slowdown=options.slowdown)
    num_slow = round(options.stragglers * options.instances)
    models = {
        f"instance-{index:04}": slow if index < num_slow else model
        for index in range(options.instances)
    }

    def build(instance_id: str) -> SimulatedInstance:
        return SimulatedInstance(
            instance_id, models[instance_id], lambda request: _remaining(request, workload)
        )

    backend = SimulatedBackend({instance_id: build(instance_id) for instance_id in models})
    everyone = list(backend.instances.values())
    requests = GenerateScheduler(backend, policy=policy, retries=RetryGeneration())

    async def check_health(instance_id: str, timeout: float | None) -> WorkerHealth:
        failure = "it was killed" if backend.instances[instance_id].is_lost else None
        return WorkerHealth(
            worker_id=instance_id, pid=0, node="", engines={instance_id: ""}, failure=failure
        )

    async def leaving() -> dict[str, PreemptionNotice]:
        return {}

    async def rebuild(instance_id: str) -> bool:
        await asyncio.sleep(options.rebuild_s)
        backend.instances[instance_id] = build(instance_id)
        everyone.append(backend.instances[instance_id])
        return True

    supervisor = Supervisor(requests, SupervisionPolicy(), Monitor(check_health, leaving), rebuild)
    for instance_id in models:
        requests.add(instance_id, options.capacity)
        supervisor.watch(instance_id)
    supervisor.start()

    def kill(instance_id: str) -> None:
        backend.instances[instance_id].kill()

    for doomed in drawn.sample(sorted(models), options.failures):
        at_s = drawn.uniform(1.0, options.mean_tokens * model.step_s)
        loop.call_later(at_s, kill, doomed)
    ended: list[float] = []
    running: list[tuple[float, int]] = []
    tickets = []
    for request in workload.requests:
        expected = workload.lengths[request.request_id] if options.known_lengths else None
        tickets += requests.put(
            [request], RequestOptions(expected_tokens=expected, priority=expected or 0)
        )
    async for ticket in requests.stream(tickets):
        ticket.future.result()
        ended.append(loop.time())
        running.append((loop.time(), requests.num_in_flight))
    supervisor.stop()
    num_new = sum(each.num_new_tokens for each in everyone)
    work = sum(workload.lengths.values())
    capacity = sum(options.capacity * each.rate(options.capacity) for each in models.values())
    return Figures(
        policy=name,
        makespan_s=ended[-1],
        bound_s=max(work / capacity, max(workload.lengths.values()) / model.rate(1)),
        cached=sum(each.num_cached_tokens for each in everyone)
        / sum(each.num_prompt_tokens for each in everyone),
        p95_s=ended[int(0.95 * (len(ended) - 1))],
        num_repeated_tokens=num_new - work,
        running=running,
    )


def _remaining(request: GenerationRequest, workload: Workload) -> int:
    return workload.lengths[request.request_id]


def table(found: Sequence[Figures]) -> str:
    """Format the results as a table."""
    rows = [
        ("policy", "makespan", "of the bound", "95 % ended", "cached prompts", "generated again")
    ]
    rows += [
        (
            each.policy,
            f"{each.makespan_s:.1f} s",
            f"{each.makespan_s / each.bound_s:.3f}",
            f"{each.p95_s:.1f} s",
            f"{each.cached:.1%}",
            f"{each.num_repeated_tokens:,} tokens",
        )
        for each in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def draw(found: Sequence[Figures], path: Path) -> None:
    """Draw the requests in flight over time, with a line for each policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for each in found:
        times, counts = zip(*each.running, strict=True)
        axes.step(times, counts, where="post", label=f"{each.policy}: {each.makespan_s:.0f} s")
    axes.axvline(
        found[0].bound_s,
        color="gray",
        linestyle=":",
        label=f"lower bound: {found[0].bound_s:.0f} s",
    )
    axes.set(xlabel="virtual seconds", ylabel="requests in flight", ylim=(0, None), xlim=(0, None))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for flag, default, text in FLAGS:
        parser.add_argument(flag, type=type(default), default=default, help=text)
    parser.add_argument(
        "--known-lengths",
        action="store_true",
        help="give the scheduler each sample's length beforehand",
    )
    parser.add_argument(
        "--policy", choices=sorted(POLICIES), action="append", help="only this one (repeatable)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/simulation.png"), help="where the picture goes"
    )
    options = parser.parse_args(arguments)
    for name in ("instances", "capacity", "prompts", "samples", "max_tokens"):
        if getattr(options, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(options, name)}; expected 1 or more"
            )
    if not 0 <= options.failures <= options.instances:
        parser.error(
            f"--failures is {options.failures}; expected 0 to {options.instances}, the number of "
            "instances"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print and draw."""
    options = parse(arguments)
    workload = make_workload(options)
    began = time.perf_counter()
    found = [
        run_virtually(simulate(name, POLICIES[name](), workload, options))
        for name in options.policy or POLICIES
    ]
    num_tokens = sum(workload.lengths.values())
    print(
        f"{len(workload.requests):,} requests of {num_tokens:,} tokens on {options.instances:,} "
        "instances"
    )
    print(table(found))
    draw(found, options.out)
    print(f"simulated in {time.perf_counter() - began:.1f} s; {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
