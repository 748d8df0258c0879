"""Test `helmsman chat-check` on real chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helmsman.__main__ import main
from helmsman.agents import chat_check
from tests.agents.chat_models import tokenizer_of


@pytest.mark.parametrize(
    ("name", "family", "appends"),
    [
        ("qwen2_5", "hermes", True),
        ("qwen3", "hermes", False),
        ("qwen3_8", "qwen_xml", True),
        ("llama3_1", "llama", True),
        ("deepseekv3", "deepseek", False),
        ("glm4moe", "glm", False),
        ("gptoss", "gptoss", False),
    ],
)
def test_chat_check_findings(name: str, family: str, appends: bool) -> None:
    report = chat_check(tokenizer_of(name))
    assert (report.family, report.appends) == (family, appends)
    read = [each.is_call_read for each in report.findings if each.is_call_read is not None]
    assert read
    assert read[0] is True
    if name == "qwen3":
        (found,) = [each for each in report.findings if each.outcome == "rewrites"]
        assert found.chat == "reasoning and answer, then a question"
        assert found.reason == "the template drops the reasoning of an earlier answer"


def test_command_chat_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer_of("qwen2_5").save_pretrained(tmp_path / "appends")
    assert main(["chat-check", str(tmp_path / "appends")]) == 0
    assert "a session is one training sample" in capsys.readouterr().out
    tokenizer_of("qwen3").save_pretrained(tmp_path / "rewrites")
    assert main(["chat-check", str(tmp_path / "rewrites"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["family"] == "hermes"
    assert main(["chat-check", str(tmp_path / "appends"), "--family", "x"]) == 2
    assert "family is 'x'; expected one of" in capsys.readouterr().err
    assert main(["chat-check", str(tmp_path)]) == 2
    assert main(["chat-check", str(tmp_path / "nosuch")]) == 2
    assert "expected a local Hugging Face folder" in capsys.readouterr().err
    (tmp_path / "rejects.jinja").write_text("{{ raise_exception('no') }}")
    given = ["--chat-template", str(tmp_path / "rejects.jinja")]
    assert main(["chat-check", str(tmp_path / "appends"), *given]) == 2
    assert "The template rejects every chat; set another one." in capsys.readouterr().out
