"""Run every check that needs an accelerator and print a table: python -m benchmarks.gpu [--rehearse
[N]] [--two-processes-one-device] [check ...]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import benchmarks.gpu.hangs
import benchmarks.gpu.memory
import benchmarks.gpu.rollouts
import benchmarks.gpu.training
import benchmarks.gpu.vllm  # noqa: F401 - they declare checks
from benchmarks.gpu.harness import CHECKS, Machine, Outcome, perform
from helmsman import LocalScheduler
from helmsman.recipes.roles import ENGINE_MODULES

OUT = Path(__file__).parents[1] / "out" / "gpu.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run checks; returns 0 when none failed, 1 when one did, 2 without devices or for an unknown
    name.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("checks", nargs="*", help="names, or leading parts of names; all when none")
    parser.add_argument(
        "--rehearse",
        type=int,
        nargs="?",
        const=2,
        metavar="N",
        help="take the CPU for N devices (2), with tiny models",
    )
    parser.add_argument(
        "--two-processes-one-device",
        action="store_true",
        help="let two workers share the first device; ranks then communicate by gloo, not NCCL",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where the table goes, in Markdown")
    options = parser.parse_args(arguments)
    names = [
        name for name in CHECKS if not options.checks or name.startswith(tuple(options.checks))
    ]
    if unknown := [
        each for each in options.checks if not any(name.startswith(each) for name in CHECKS)
    ]:
        print(
            f"there is no check {', '.join(unknown)}; there are {', '.join(CHECKS)}",
            file=sys.stderr,
        )
        return 2
    is_one_device = options.two_processes_one_device
    if is_one_device and not options.rehearse:
        try:
            os.environ["CUDA_VISIBLE_DEVICES"] = two_names()
        except (OSError, subprocess.SubprocessError) as error:
            print(f"--two-processes-one-device needs an NVIDIA GPU: {error}", file=sys.stderr)
            return 2
    logs = Path(tempfile.mkdtemp(prefix="helmsman-gpu-check-"))
    with LocalScheduler(
        log_dir=logs, num_gpus=options.rehearse, preload=ENGINE_MODULES
    ) as scheduler:
        machine = Machine(
            scheduler,
            is_rehearsal=options.rehearse is not None,
            is_one_device=is_one_device,
        )
        code = run(names, machine, options.out)
    if code == 1:
        print(f"the workers' logs are in {logs}", file=sys.stderr)
    else:
        shutil.rmtree(logs)
    return code


def two_names() -> str:
    """Return a mask that names one NVIDIA device twice, once by the beginning of its UUID.

    Each process of the scheduler then gets one of the names, and CUDA resolves both.

    Raises:
        OSError: There is no nvidia-smi.
        subprocess.SubprocessError: nvidia-smi fails.
    """
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", "-i", first]
    uuid = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return f"{uuid.strip()},{uuid.strip()[:-4]}"


def run(names: Sequence[str], machine: Machine, out: Path) -> int:
    """Perform checks one after another, print and write the table; returns the exit code."""
    if not machine.num_devices:
        print(
            "this machine has no accelerator that Helmsman sees (`helmsman doctor` says what it "
            "looks at); "
            "--rehearse runs the checks on the CPU, with tiny models",
            file=sys.stderr,
        )
        return 2
    print(about(machine), flush=True)
    outcomes = []
    with machine.closing:
        for name in names:
            outcomes.append(perform(name, machine))
            print(line(outcomes[-1]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        f"{about(machine)}\n\n{HEADER}\n" + "".join(f"{line(each)}\n" for each in outcomes)
    )
    failed = [each.name for each in outcomes if each.result == "failed"]
    print(
        f"\n{sum(each.result == 'ok' for each in outcomes)} of {len(outcomes)} checks ok; the "
        f"table is in {out}"
    )
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


HEADER = "| check | result | s | figures |\n|---|---|---|---|"


def line(outcome: Outcome) -> str:
    """Return a row of the table."""
    figures = "; ".join(
        f"{what} {figure}" for what, figure in outcome.figures.items()
    ) or outcome.reason.replace("|", "/")
    return f"| {outcome.name} | {outcome.result} | {outcome.seconds:.0f} | {figures} |"


def about(machine: Machine) -> str:
    """Describe the machine, the date and the versions."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "torch_npu", "transformers", "vllm", "ray", "helmsman"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = (
        "a rehearsal on the CPU"
        if machine.is_rehearsal
        else f"1 device: {_devices()}"
        if machine.is_one_device
        else f"{machine.num_devices} devices: {_devices()}"
    ) + (", two processes on one device" if machine.is_one_device else "")
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {devices}; {', '.join(versions)}"


def _devices() -> str:
    for command in (
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        ["npu-smi", "info", "-l"],
    ):
        try:
            told = subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return " / ".join(sorted({part.strip() for part in told.splitlines() if part.strip()}))
    return "of a kind that tells no name"


if __name__ == "__main__":
    sys.exit(main())
