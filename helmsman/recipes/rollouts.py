"""``helmsman rollouts``: shows the recorded rollouts of a run, and searches them."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.recipes.recorded import RecordingError, find_parts, read_part
from helmsman.recipes.samples import cell

_SHOWN = ["step", "draw", "answer", "prompt", "completion", "expected", "total", "rewards"]
_SHOWN += ["is_truncated", "started", "seconds", "turn_rewards", "versions", "loss_mask"]


def main(arguments: Sequence[str]) -> int:
    """Run ``helmsman rollouts``.

    Args:
        arguments: The command line after ``rollouts``.

    Returns:
        0 if some rollouts match, 1 if none does.

    Raises:
        RecordingError: The recording is missing or unusable.
        OSError: It cannot be read.
    """
    parser = argparse.ArgumentParser("helmsman rollouts", description="Show recorded rollouts.")
    add = parser.add_argument
    add("run", metavar="RUN", help="output folder of a run with rollout.record, or one part of it")
    add("--step", type=steps, help="one, or some as 10-20; default: the last, or all in a search")
    add("--grep", default="", metavar="REGEX", help="in the prompt or the answer; (?i): any case")
    add("--min-reward", type=float, default=-math.inf, metavar="R", help="from this reward on")
    add("--max-reward", type=float, default=math.inf, metavar="R", help="up to this reward")
    add("-n", "--lines", type=int, default=20, help="most to show; default 20; 0: all")
    add("--full", action="store_true", help="show whole texts in place of a table")
    add("--json", action="store_true", help="show a line of JSON for each")
    options = parser.parse_args(arguments)
    try:
        options.pattern = re.compile(options.grep)
        return 0 if _show(options) else 1
    except re.error as error:
        parser.error(f"argument --grep: {options.grep!r} is no regular expression: {error}")


def steps(text: str) -> range:
    """Parse the value of ``--step``."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _show(options: argparse.Namespace) -> int:
    """Print the rollouts that match, and return their number."""
    parts, num_found = find_parts(Path(options.run)), 0
    if not parts:
        raise RecordingError(
            f"there are no recorded rollouts ({options.run}), expected the output folder of a run "
            "with rollout.record that has completed a batch"
        )
    low, high = options.min_reward, options.max_reward
    searches = options.grep or (low, high) != (-math.inf, math.inf)
    chosen = options.step
    if chosen is None:
        chosen = parts if searches else [max(parts)]
    for row in (row for at in parts if at in chosen for row in read_part(parts[at], _SHOWN)[1]):
        texts = row["prompt"], row["completion"]
        if low <= row["total"] <= high and any(map(options.pattern.search, texts)):
            num_found += 1
            if not 0 < options.lines < num_found:
                print(_text(row, options))
    if num_found > options.lines > 0:
        print(f"{options.lines} of {num_found} are shown; -n 0: all", file=sys.stderr)
    if not num_found:
        print(f"nothing matches; there are steps {min(parts)} to {max(parts)}", file=sys.stderr)
    return num_found


def _text(row: dict[str, Any], options: argparse.Namespace) -> str:
    pairs = zip(row.pop("versions"), row.pop("loss_mask"), strict=True)
    versions = [version for version, is_sampled in pairs if is_sampled]
    made_by = sorted(set(versions))
    if options.json:
        row |= {"num_tokens": len(versions), "versions": made_by}
        return msgspec.json.encode(row).decode()
    head = f"step {row['step']:<5} draw {row['draw']:<6} answer {row['answer']:<3} "
    head += f"reward {row['total']:<8.3f} tokens {len(versions):<6} versions {made_by!s:<8}"
    if options.full:
        cut = "cut off" if row["is_truncated"] else ""
        first = f"=== {head} {cut}\n{row['rewards']}, expected: {row['expected']}"
        return f"{first}\n--- prompt\n{row['prompt']}\n--- answer\n{row['completion']}"
    for text in (row["prompt"], row["completion"]):
        match = options.pattern.search(text)
        head += "  " + cell(text[max(0, match.start() - 16) if match else 0 :])
    return head.rstrip()
