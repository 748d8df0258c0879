"""``helmsman doctor``: the checks of each node, and the differences between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from helmsman.controller._node.checks import Check, Observed, State, judge

MOST_SKEW_S = 1.0
"""Clocks that are further apart make logs and time-outs hard to read."""

_SAME_EVERYWHERE = ("python", "helmsman", "ray", "torch", "transformers", "vllm")
"""A cluster whose nodes differ in these does not start, or fails later."""
_ADVISED_SAME = ("kernel", "cpus", "memory", "accelerators", "open files", "shared memory")
_RANKS: Mapping[State, int] = {"ok": 0, "warn": 1, "bad": 2}


class Examined(msgspec.Struct, frozen=True):
    node: str
    checks: list[Check]


class Diagnosis(msgspec.Struct, frozen=True):
    nodes: list[Examined]
    between: list[Check]

    @property
    def state(self) -> State:
        checks = [check for node in self.nodes for check in node.checks] + self.between
        return max((check.state for check in checks), key=_RANKS.__getitem__, default="ok")

    def report(self, *, everything: bool = False) -> str:
        """For people: the table of a single node; of several, the checks that are not ok, and the differences."""
        if len(self.nodes) == 1:
            return "\n".join([_table(self.nodes[0].checks), *_advice(self.nodes[0].checks)])
        lines = [f"{len(self.nodes)} nodes"]
        for node in self.nodes:
            shown = [check for check in node.checks if everything or check.state != "ok"]
            lines += ["", f"{node.node}: {'in order' if not shown else ''}".rstrip(), *([_table(shown)] if shown else [])]
            lines += _advice(shown)
        lines += ["", "between the nodes:", _table(self.between), *_advice(self.between)]
        return "\n".join(lines)


def diagnose(
    seen: Mapping[str, Observed], *, num_devices: int | None = None, skews_s: Mapping[str, float] | None = None
) -> Diagnosis:
    """Evaluate nodes by their facts.

    ``skews_s`` are the seconds that each clock is ahead of this one's; every node should have ``num_devices`` accelerators.
    """
    nodes = [Examined(node, judge(observed, num_devices=num_devices)) for node, observed in seen.items()]
    return Diagnosis(nodes, _between(nodes, skews_s or {}) if len(nodes) > 1 else [])


def _between(nodes: Sequence[Examined], skews_s: Mapping[str, float]) -> list[Check]:
    checks = []
    values = {node.node: {check.name: check.value for check in node.checks} for node in nodes}
    for name in (*_SAME_EVERYWHERE, *_ADVISED_SAME):
        found = {node: each.get(name, "not installed") for node, each in values.items()}
        (usual, num_usual), *_ = Counter(found.values()).most_common()
        if num_usual == len(found):
            continue
        others = {value: [node for node, own in found.items() if own == value] for value in found.values() if value != usual}
        value = "; ".join([f"{usual} on most", *(f"{value} on {', '.join(where)}" for value, where in others.items())])
        if name in _SAME_EVERYWHERE:
            checks.append(Check(name, value, "bad", "Install the same version on every node"))
        else:
            checks.append(Check(name, value, "warn", "That may be meant; if not, look at the nodes that differ"))
    if skews_s:
        spread = max(skews_s.values()) - min(skews_s.values())
        value, ahead = f"{spread:.2f} s apart", max(skews_s, key=lambda node: skews_s[node])
        if spread > MOST_SKEW_S:
            step = "Let all nodes follow one time server (chronyc tracking)"
            checks.append(Check("clocks", f"{value}, {ahead} is furthest ahead", "warn", step))
        else:
            checks.append(Check("clocks", value))
    return checks or [Check("differences", "none")]


def _table(checks: Sequence[Check]) -> str:
    width = max((len(check.name) for check in checks), default=0)
    marks: Mapping[State, str] = {"ok": "ok  ", "warn": "WARN", "bad": "BAD "}
    return "\n".join(f"  {marks[check.state]}  {check.name.ljust(width)}  {check.value}" for check in checks)


def _advice(checks: Sequence[Check]) -> list[str]:
    return [f"  {check.name}: {check.advice.rstrip('.')}." for check in checks if check.advice and check.state != "ok"]


def skew_s(observed: Observed, asked_at: float, answered_at: float) -> float:
    """Seconds that a node's clock is ahead of this one's, at least; the time of the question bounds the precision."""
    if asked_at <= observed.clock <= answered_at:
        return 0.0
    return observed.clock - (answered_at if observed.clock > answered_at else asked_at)
