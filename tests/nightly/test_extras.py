"""Tests that engines and recipes name the command that installs transformers."""

from __future__ import annotations

from helmsman.api.extras import install_command
from tests.without_packages import CREATE, run_without


def test_engine_names_install_command() -> None:
    output = run_without(["transformers"], CREATE)
    assert "FSDPTrainEngine needs the package 'transformers', which is not installed" in output
    assert install_command("transformers") in output


def test_grpo_hf_names_install_command() -> None:
    begin = (
        "from helmsman.recipes.command import main; print(main('grpo', ['--config', 'cpu_smoke']))"
    )
    output = run_without(["transformers"], f"sys.stderr = sys.stdout\n{begin}")
    assert "the tokenizer of a model folder needs the package 'transformers'" in output
    assert install_command("transformers") in output
    assert output.endswith("2\n")


def test_recorded_rollouts_name_install_command() -> None:
    show = "from helmsman.__main__ import main; print(main(['rollouts', 'step-000001.parquet']))"
    part = "open('step-000001.parquet', 'w').close()"
    move = "import os, tempfile; os.chdir(tempfile.mkdtemp())"
    output = run_without(["pyarrow"], f"sys.stderr = sys.stdout\n{move}\n{part}\n{show}")
    assert "a recording of rollouts needs the package 'pyarrow'" in output
    assert install_command("pyarrow") in output
    assert output.endswith("2\n")
