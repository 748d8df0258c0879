"""Tests of the web page of a run in a headless Chromium."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from helmsman import LocalScheduler
from helmsman._cli import main
from helmsman._desk.runs import find_run
from helmsman._desk.ui import Server, write_report
from tests.desk.served_page import served
from tests.desk.staged import stale_samples
from tests.desk.staged_runs import Staged, end

__all__ = ["served"]
aiohttp = pytest.importorskip("aiohttp")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.timeout(180),
]


class Browser:
    """A page of a headless Chromium, controlled by its DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.problems: list[str] = []
        """Errors of the console, exceptions and failed requests."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _note(self, message: dict[str, Any]) -> None:
        kind, params = message.get("method"), message.get("params", {})
        is_error = kind in ("Runtime.exceptionThrown", "Network.loadingFailed") or (
            kind == "Log.entryAdded" and params["entry"]["level"] == "error"
        )
        if is_error or (kind == "Runtime.consoleAPICalled" and params["type"] == "error"):
            self.problems.append(json.dumps(params))

    async def open(self, url: str) -> None:
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        for _ in range(300):
            if found := await self.value(expression):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError((expression, await self.value("document.body.innerText")))


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    profile = tmp_path / "profile"
    process = await asyncio.to_thread(
        subprocess.Popen,
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = profile / "DevToolsActivePort"
        for _ in range(600):
            if port_file.exists() and port_file.read_text().strip():
                break
            await asyncio.sleep(0.1)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                pages = await answer.json()
            url = next(each["webSocketDebuggerUrl"] for each in pages if each["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                yield Browser(socket)
    finally:
        process.kill()
        process.wait()


async def rendered(browser: Browser) -> None:
    """Check that the page shows both workers, and the log of one after a click."""
    await browser.until("document.querySelectorAll('#workers tr').length === 2")
    assert "Helmsman run" in await browser.value("document.getElementById('title').textContent")
    assert await browser.value("document.getElementById('timeline').width > 100")
    await browser.value("document.querySelector('[data-worker=\"rollout/1\"]').click()")
    log = "document.getElementById('log').textContent"
    await browser.until(f"{log}.includes('rollout/1 engine rollout/1 is created')")


async def test_page_of_live_run(served: Server, browser: Browser) -> None:
    await browser.open(served.url)
    await rendered(browser)
    assert await browser.value("document.getElementById('state').textContent") == "healthy"
    stacks = await browser.value("document.getElementById('stacks').textContent")
    assert "engine" in stacks
    pixels = (
        "new Set(document.getElementById('timeline').getContext('2d')"
        ".getImageData(0, 0, 900, 60).data).size"
    )
    assert await browser.value(pixels) > 3
    assert browser.problems == []


async def test_report_of_killed_run(
    stage: Callable[[str], Staged], browser: Browser, tmp_path: Path
) -> None:
    staged = stage("straggler")
    log_dir = find_run(staged.run_id).log_dir
    end(staged.process)
    copy, out = tmp_path / "copy", tmp_path / "run.html"
    shutil.copytree(log_dir, copy)
    assert main(["report", str(copy), "-o", str(out)]) == 0
    await browser.open(out.as_uri())
    await rendered(browser)
    assert await browser.value("document.getElementById('state').textContent") == "has ended"
    assert browser.problems == []


async def test_page_shows_samples_of_older_weights(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "run.html"

    def write() -> None:
        with LocalScheduler(preload=()) as scheduler, stale_samples(scheduler):
            write_report(find_run(scheduler.run_id), out)

    await asyncio.to_thread(write)
    await browser.open(out.as_uri())
    await browser.until("document.querySelectorAll('#workers tr').length === 2")
    figures = await browser.value("document.getElementById('figures').textContent")
    assert "1.33rollout samples: versions behind, mean" in figures
    assert "2rollout samples: versions behind, most" in figures
    assert browser.problems == []


async def test_page_of_many_workers(browser: Browser, tmp_path: Path) -> None:
    from helmsman import InlineScheduler, Job, SchedulingSpec

    with InlineScheduler(log_dir=tmp_path / "logs") as scheduler:
        spec = SchedulingSpec(cpu=0.001)
        scheduler.create_workers(Job(role="actor", replicas=200, tasks=[spec]))
        out = tmp_path / "run.html"
        await asyncio.to_thread(write_report, find_run(scheduler.run_id), out)
    await browser.open(out.as_uri())
    await browser.until("document.querySelectorAll('#workers tr').length === 200")
    assert "200 workers by role" in await browser.value(
        "document.getElementById('span').textContent"
    )
    assert await browser.value("document.getElementById('timeline').clientHeight < 100")
    assert browser.problems == []
