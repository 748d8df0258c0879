"""Compare accuracy and speed of asynchronous and synchronous GRPO, in turns, over several seeds.

    python -m benchmarks.asynchronous    # 3 seeds, the settings of make demo; about 15 minutes
    python -m benchmarks.asynchronous --seeds 0 1 --steps 40 --sft-steps 60

Every run is examples/grpo.py in a process of its own. Results in benchmarks/out/asynchronous.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "out" / "asynchronous.json"
MODES: dict[str, list[str]] = {"sync": [], "async": ["--async", "--staleness", "1"]}


def run(mode: str, seed: int, scheduler: str, more: list[str]) -> dict[str, Any]:
    """Run once and return the summary; CalledProcessError has the output of a failed run."""
    with tempfile.TemporaryDirectory(prefix="helmsman-bench-") as out:
        flags = ["--scheduler", scheduler, "--seed", str(seed), "--out", out, *MODES[mode], *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, str(ROOT / "examples" / "grpo.py"), *flags],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        summary: dict[str, Any] = json.loads((Path(out) / "summary.json").read_text())
        return {"mode": mode, **summary}


def compare(runs: list[dict[str, Any]]) -> str:
    """Return a table of runs, and a comparison of the modes."""
    lines = [
        f"{'seed':>4}  {'mode':<6}{'before GRPO':>12}{'after':>8}{'tokens/s':>10}{'seconds':>9}"
    ]
    lines += [
        f"{each['seed']:>4}  "
        f"{each['mode']:<6}{each['accuracy_after_sft']:>12.3f}{each['accuracy_after_grpo']:>8.3f}"
        f"{each['tokens_per_s']:>10,.0f}{each['seconds']:>9.0f}"
        for each in runs
    ]
    of = {mode: [each for each in runs if each["mode"] == mode] for mode in MODES}
    after = {
        mode: [each["accuracy_after_grpo"] for each in each_of] for mode, each_of in of.items()
    }
    mean = {mode: statistics.fmean(values) for mode, values in after.items()}
    spread = max(max(values) - min(values) for values in after.values())
    ratios = [
        a["tokens_per_s"] / s["tokens_per_s"] for s, a in zip(of["sync"], of["async"], strict=True)
    ]
    lines.append(
        f"held-out accuracy after GRPO: sync {mean['sync']:.3f}, async {mean['async']:.3f}, "
        "difference "
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
        description=(__doc__ or "").split("\n", 1)[0], epilog="Other flags go to examples/grpo.py."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scheduler", default="local")
    arguments, more = parser.parse_known_args()
    runs = []
    for seed in arguments.seeds:
        for mode in MODES:
            runs.append(run(mode, seed, arguments.scheduler, more))
            print(f"seed {seed}, {mode}: done", file=sys.stderr, flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(runs, indent=1) + "\n")
    print(compare(runs))


if __name__ == "__main__":
    main()
