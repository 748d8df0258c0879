"""Train a Hugging Face model by GRPO, Dr. GRPO or DAPO on prompts and answers: the recipe as a
script.

    python examples/grpo_hf.py --config one_machine_8gpu --model path/to/model --data train.jsonl

`helmsman grpo` takes the same flags; docs/recipes.md describes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the script is run by its path, in a clone

from helmsman.recipes.command import main

if __name__ == "__main__":
    sys.exit(main("grpo"))
