"""Tests of the rules about episodes, sessions, tools and rewards."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from helmsman._desk.diagnosis import diagnose_run
from helmsman._desk.evidence import Finding
from helmsman._desk.texts import status_text
from helmsman.api.run_state import (
    Frame,
    OpenItem,
    RunSnapshot,
    StackTrace,
    WaitSnapshot,
    WorkSnapshot,
)
from tests.unit.desk.test_rules import diagnosed, run

WAIT = WaitSnapshot(call="prepare_batch", age_s=60.0, num_ready=7, num_wanted=8)


def item(**fields: Any) -> OpenItem:
    defaults: dict[str, Any] = {
        "number": 3,
        "name": "'2+2'",
        "age_s": 50.0,
        "still_s": 40.0,
        "waits_for": "awaits Event.wait at a.py:7 (await done.wait())",
    }
    return OpenItem(**(defaults | fields))


def work(*items: OpenItem, **fields: Any) -> WorkSnapshot:
    defaults: dict[str, Any] = {
        "kind": "episode",
        "name": "solve",
        "num_open": len(items),
        "num_done": 9,
        "median_s": 2.0,
        "items": list(items),
        "waits": [WAIT],
    }
    return WorkSnapshot(**(defaults | fields))


def findings(*sources: WorkSnapshot) -> list[Finding]:
    return diagnosed(run(work=list(sources))).findings


def test_hung_episode() -> None:
    (found,) = findings(work(item()))
    assert found.rule == "hung episode"
    assert found.cause == (
        "Episode 3 of solve ('2+2') has made no progress for 40.0 s: it awaits Event.wait at a.py:7"
        " (await done.wait()). prepare_batch has waited for 60.0 s; 7 of 8 episodes are finished."
    )
    assert found.evidence == ["it began 50.0 s ago; the median is 2.0 s"]
    assert "asyncio.timeout" in found.next_step
    assert found.is_problem


@pytest.mark.parametrize(
    "source",
    [
        work(item(still_s=9.0)),
        work(item(still_s=40.0), median_s=10.0),
        work(item(still_s=14.0), median_s=None),
        work(item(is_explained=True)),
        work(item(still_s=29.0), kind="outside session", median_s=None),
    ],
)
def test_work_that_is_not_hung(source: WorkSnapshot) -> None:
    assert findings(source) == []


def test_item_that_computes_has_more_time() -> None:
    now = run(work=[work(item(cpu_s=5.0))])
    before = msgspec.structs.replace(now, taken_at=100.0, work=[work(item(cpu_s=4.0))])
    assert diagnose_run(now, before).findings == []
    later = msgspec.structs.replace(now, work=[work(item(cpu_s=5.0, still_s=41.0))])
    assert diagnose_run(later, before).findings != []


def test_item_whose_stack_changes_is_not_hung() -> None:
    def stack(function: str) -> StackTrace:
        return StackTrace(thread="t", frames=[Frame("a.py", 1, function)])

    now = run(work=[work(item(stack=stack("f")))])
    before = msgspec.structs.replace(now, taken_at=100.0, work=[work(item(stack=stack("g")))])
    assert diagnose_run(now, before).findings == []


def test_hung_episode_that_holds_no_batch_is_a_note() -> None:
    (found,) = findings(work(item(), waits=[]))
    assert not found.is_problem


def test_reward_is_evidence_for_its_episode() -> None:
    score = item(number=1, name="score('a')", waits_for="runs on reward/0", worker_id="reward/0")
    reward = work(score, kind="reward", name="reward", waits=[])
    (found,) = findings(reward, work(item()))
    assert found.rule == "hung episode"
    assert found.evidence[1] == "Reward 1 of reward (score('a')) runs on reward/0"
    (found,) = findings(reward)
    assert (found.rule, found.is_problem) == ("hung reward", True)


def test_no_work_in_flight() -> None:
    waits = [msgspec.structs.replace(WAIT, remark="Mine admits no more at version 1")]
    (found,) = findings(work(waits=waits))
    assert found.rule == "no work in flight"
    assert found.cause == (
        "prepare_batch has waited for 60.0 s; 7 of 8 episodes are finished, and no episode is open:"
        " Mine admits no more at version 1."
    )
    assert findings(work(waits=[msgspec.structs.replace(WAIT, num_ready=8)])) == []


def test_waits_for_names_the_batch() -> None:
    text = diagnosed(run(work=[work(item(still_s=1.0))])).waits_for
    assert text.startswith(
        "prepare_batch has waited for 60.0 s; 7 of 8 episodes are finished, 1 run; the oldest, 3, "
        "awaits Event.wait at a.py:7 (await done.wait()). "
    )


def test_status_shows_work() -> None:
    snapshot: RunSnapshot = run(work=[work(*(item(number=n) for n in range(7)), num_open=4000)])
    text = status_text(snapshot, diagnosed(snapshot))
    assert (
        "episodes of solve: 4000 open, 9 ended, median 2.0 s; prepare_batch has 7 of 8 (60.0 s)\n"
        "  0 ('2+2') for 50.0 s, no progress for 40.0 s: awaits Event.wait at a.py:7 (await done"
    ) in text
    assert "\n  and 3995 more" in text
