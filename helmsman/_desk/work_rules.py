"""Rules about open work: hung episodes, sessions, tools and rewards, and batches without any."""

from __future__ import annotations

from collections.abc import Iterator

from helmsman._desk.evidence import (
    BUSY,
    FIRST_S,
    Evidence,
    Finding,
    is_long,
    seconds,
    usual,
)
from helmsman.api.run_state import OpenItem, RunSnapshot, WaitSnapshot, WorkSnapshot

_AGENT_S = 30.0
"""The first session is long after this without a request, since agents work between requests."""
_COMPUTING = 4.0
"""Multiple of the limits for an item whose thread or process uses the CPU."""
_ABSENT_S = 30.0
"""The first wait for items is long after this if there are none."""
_LIMITS = {
    "episode": "Give the wait a limit, such as asyncio.timeout(60), or lower "
    "WorkflowExecutor(episode_timeout=...), which cancels the episode",
    "outside session": "Look at its agent; AgentGateway(outside_timeout=...) ends the session",
    "session": "Look at its agent, and give it a limit",
    "tool call": "Give the tool a limit, such as ToolLoop(timeout=...)",
    "tool function": "Give the function a limit: FunctionTools(timeout=...)",
    "reward": "Give it a limit: RewardPool(timeout=...)",
}
"""Kind of items, outermost first -> next step."""


def hung_work(evidence: Evidence) -> Iterator[Finding]:
    """An episode, session, tool call or reward makes no progress, or a batch has none to wait for.

    Items of inner kinds are evidence for those of outer ones, which wait for them.
    """
    work = evidence.now.work
    found = [
        (source, item)
        for kind in _LIMITS
        for source in work
        if source.kind == kind
        for item in source.items
        if _is_hung(source, item, evidence)
    ]
    waits = [(source, wait) for source in work for wait in source.waits]
    has_episodes = any(each.kind == "episode" and each.num_open for each in work)
    if found:
        source, item = found[0]
        # Items that it waits for, or that wait for it, may have other limits.
        related = [
            (each, other)
            for each in work
            for other in each.items
            if each.kind != source.kind
            and not other.is_explained
            and (each, other) not in found
            and other.still_s > item.still_s / 2
        ]
        alike = sum(each is source for each, _ in found)
        others = f", and {alike - 1} more are as late" if alike > 1 else ""
        doing = f"has made no progress for {seconds(item.still_s)}: it {item.waits_for}{others}"
        held = [_held(each, wait) for each, wait in waits]
        cause = f"{_named(source, item)} {doing}." + (f" {held[0]}." if held else "")
        shown = [f"it began {seconds(item.age_s)} ago; {usual(source.median_s)}", *held[1:3]]
        shown += [f"{_named(*each)} {each[1].waits_for}" for each in [*found[1:4], *related[:4]]]
        is_awaited = bool(waits) or (source.kind != "outside session" and not has_episodes)
        step = f"{_LIMITS[source.kind]}; helmsman stacks RUN script shows all threads."
        workers = [each.worker_id for _, each in found if each.worker_id and is_awaited]
        yield Finding(
            *(f"hung {source.kind}", f"{source.kind} {item.number}", cause, step),
            *(workers, shown, item.still_s, is_awaited),
        )
    for source, wait in waits:
        if wait.blocked_at and is_long(wait.age_s, wait.median_s, first_s=FIRST_S):
            cause = f"{_held(source, wait)}: it {wait.blocked_at}."
            step = "The source of items and the batch policy must not block; prepare items earlier."
            yield Finding("event loop blocked", wait.call, cause, step, since_s=wait.age_s)
            continue
        if source.num_open or wait.num_ready >= wait.num_wanted:
            continue
        if is_long(wait.age_s, wait.median_s, first_s=_ABSENT_S):
            cause = f"{_held(source, wait)}, and no {source.kind} is open: "
            cause += f"{wait.remark or 'none has begun'}."
            step = "Call set_version() after each weight update, or use another batch policy."
            if source.kind != "episode":
                step = f"Start agents that open sessions at {source.name}."
            yield Finding("no work in flight", wait.call, cause, step, since_s=wait.age_s)


def _is_hung(source: WorkSnapshot, item: OpenItem, evidence: Evidence) -> bool:
    if item.is_explained:
        return False
    earlier = next(
        (
            other
            for each in evidence.before.work
            if (each.kind, each.name) == (source.kind, source.name)
            for other in each.items
            if other.number == item.number
        ),
        None,
    )
    if earlier is not None and _functions(earlier) != _functions(item):
        return False
    used_s = (item.cpu_s or 0.0) - (earlier.cpu_s or 0.0) if earlier is not None else 0.0
    script, before = evidence.now.script, evidence.before.script
    if item.awaits_process and script is not None and before is not None:
        used_s = script.cpu_s - before.cpu_s
    first_s = _AGENT_S if source.kind.endswith("session") else FIRST_S
    times = _COMPUTING if used_s > BUSY * max(evidence.apart_s, 0.01) else 1.0
    return is_long(item.still_s, source.median_s, factor=5.0 * times, first_s=first_s * times)


def _functions(item: OpenItem) -> list[str]:
    return [each.function for each in item.stack.frames] if item.stack is not None else []


def _named(source: WorkSnapshot, item: OpenItem) -> str:
    return f"{source.kind.capitalize()} {item.number} of {source.name} ({item.name})"


def _held(source: WorkSnapshot, wait: WaitSnapshot) -> str:
    have = f"{wait.num_ready} of {wait.num_wanted} {source.kind}s are finished"
    return f"{wait.call} has waited for {seconds(wait.age_s)}; {have}"


def waits_text(run: RunSnapshot) -> str:
    """Describe the batches that wait for episodes or sessions; '' without any."""
    parts = []
    for source in run.work:
        for wait in source.waits:
            oldest = next(iter(source.items), None)
            text = f"{_held(source, wait)}, {source.num_open} run"
            if oldest is not None:
                text += f"; the oldest, {oldest.number}, {oldest.waits_for}"
            parts.append(text + (f" ({wait.remark})" if wait.remark else "") + ". ")
    return "".join(parts[:4])
