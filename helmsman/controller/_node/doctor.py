"""``helmsman doctor``: what each node is like, what is wrong with it, and where nodes differ."""

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
    """A node and what was found."""

    node: str
    checks: list[Check]


class Diagnosis(msgspec.Struct, frozen=True):
    """All nodes, and what is wrong between them."""

    nodes: list[Examined]
    between: list[Check]

    @property
    def state(self) -> State:
        """The worst there is."""
        checks = [check for node in self.nodes for check in node.checks] + self.between
        return max((check.state for check in checks), key=_RANKS.__getitem__, default="ok")

    def report(self, *, everything: bool = False) -> str:
        """As people read it: a single node's table; of several, what is not in order, and where they differ."""
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
    """What to think of the nodes.

    Args:
        seen: node -> what was observed there.
        num_devices: accelerators that each should have.
        skews_s: node -> how far its clock is ahead of this one's, in seconds.
    """
    nodes = [Examined(node, judge(observed, num_devices=num_devices)) for node, observed in seen.items()]
    return Diagnosis(nodes, _between(nodes, skews_s or {}) if len(nodes) > 1 else [])


def _between(nodes: Sequence[Examined], skews_s: Mapping[str, float]) -> list[Check]:
    checks = []
    values = {node.node: {check.name: check.value for check in node.checks} for node in nodes}
    for name in (*_SAME_EVERYWHERE, *_ADVISED_SAME):
        found = {node: each.get(name, "not installed") for node, each in values.items()}
        kinds = Counter(found.values())
        if len(kinds) == 1:
            continue
        usual = kinds.most_common(1)[0][0]
        others = "; ".join(f"{value} on {_names(found, value)}" for value in kinds if value != usual)
        needed = name in _SAME_EVERYWHERE
        advice = (
            "Install the same version on every node" if needed else "That may be meant; if not, look at the nodes that differ"
        )
        checks.append(Check(name, f"{usual} on most; {others}", "bad" if needed else "warn", advice))
    if skews_s:
        spread = max(skews_s.values()) - min(skews_s.values())
        ahead = max(skews_s, key=lambda node: skews_s[node])
        late = spread > MOST_SKEW_S
        checks.append(
            Check(
                "clocks",
                f"{spread:.2f} s apart" + (f", {ahead} is furthest ahead" if late else ""),
                "warn" if late else "ok",
                "Let all nodes follow one time server (chronyc tracking)" if late else "",
            )
        )
    return checks or [Check("differences", "none")]


def _names(found: Mapping[str, str], value: str) -> str:
    return ", ".join(node for node, each in found.items() if each == value)


def _table(checks: Sequence[Check]) -> str:
    width = max((len(check.name) for check in checks), default=0)
    marks: Mapping[State, str] = {"ok": "ok  ", "warn": "WARN", "bad": "BAD "}
    return "\n".join(f"  {marks[check.state]}  {check.name.ljust(width)}  {check.value}" for check in checks)


def _advice(checks: Sequence[Check]) -> list[str]:
    return [f"  {check.name}: {check.advice.rstrip('.')}." for check in checks if check.advice and check.state != "ok"]


def skew_s(observed: Observed, asked_at: float, answered_at: float) -> float:
    """How far a node's clock is ahead of this one's, as far as the time of the question lets it be known."""
    if asked_at <= observed.clock <= answered_at:
        return 0.0
    return observed.clock - (answered_at if observed.clock > answered_at else asked_at)
