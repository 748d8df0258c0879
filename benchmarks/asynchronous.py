"""Compare accuracy and speed of asynchronous and synchronous GRPO, in turns, over several seeds.

    python -m benchmarks.asynchronous    # 3 seeds, the configuration of make demo
    python -m benchmarks.asynchronous --seeds 0 1 --steps 40

Every run is `helmsman grpo --config demo` in a process of its own, on local processes with one
thread each for trainer and rollout. Results in benchmarks/out/asynchronous.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from helmsman.recipes.demo import write_inputs

OUT = Path(__file__).resolve().parent / "out" / "asynchronous.json"
MODES = {"sync": "0", "async": "1"}
"""Name -> rollout.staleness."""


def run(mode: str, seed: int, more: list[str]) -> dict[str, Any]:
    """Run once and return the summary; CalledProcessError has the output of a failed run."""
    with tempfile.TemporaryDirectory(prefix="helmsman-bench-") as folder:
        write_inputs(Path(folder) / "runs" / "demo_inputs")
        settings = {
            "cluster.scheduler": "local",
            "cluster.train_threads": "1",
            "cluster.rollout_threads": "1",
            "rollout.staleness": MODES[mode],
            "seed": str(seed),
        }
        flags = [text for key, value in settings.items() for text in (f"--{key}", value)]
        command = [sys.executable, "-m", "helmsman", "grpo", "--config", "demo", *flags, *more]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "runs" / "demo" / "summary.json").read_text())
        return {"mode": mode, "seed": seed, **summary}


def compare(runs: list[dict[str, Any]]) -> str:
    """Return a table of runs, and a comparison of the modes."""
    lines = [f"{'seed':>4}  {'mode':<6}{'before':>8}{'after':>8}{'tokens/s':>10}{'seconds':>9}"]
    lines += [
        f"{each['seed']:>4}  {each['mode']:<6}{each['accuracy_first']:>8.3f}"
        f"{each['accuracy_last']:>8.3f}{each['tokens_per_second']:>10,.0f}{each['seconds']:>9.0f}"
        for each in runs
    ]
    of = {mode: [each for each in runs if each["mode"] == mode] for mode in MODES}
    after = {mode: [each["accuracy_last"] for each in found] for mode, found in of.items()}
    mean = {mode: statistics.fmean(values) for mode, values in after.items()}
    spread = max(max(values) - min(values) for values in after.values())
    ratios = [
        ahead["tokens_per_second"] / plain["tokens_per_second"]
        for plain, ahead in zip(of["sync"], of["async"], strict=True)
    ]
    lines.append(
        f"held-out accuracy: sync {mean['sync']:.3f}, async {mean['async']:.3f}, difference "
        f"{mean['async'] - mean['sync']:+.3f}; seeds of one mode differ by up to {spread:.3f}"
    )
    lines.append(
        f"tokens/s, async over sync: {', '.join(f'{ratio:.2f}' for ratio in ratios)}, median "
        f"{statistics.median(ratios):.2f}"
    )
    return "\n".join(lines)


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0], epilog="Other flags go to `helmsman grpo`."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, more = parser.parse_known_args()
    runs = []
    for seed in arguments.seeds:
        for mode in MODES:
            runs.append(run(mode, seed, more))
            print(f"seed {seed}, {mode}: done", file=sys.stderr, flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(runs, indent=1) + "\n")
    print(compare(runs))


if __name__ == "__main__":
    main()
