"""The tokenizer of a local Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helmsman.api.extras import needed_by


class FolderTokenizer:
    """The tokenizer of a local Hugging Face folder; applies its chat template, if it has one.

    Raises:
        ValueError: There is no such folder, or its tokenizer is unusable.
        BackendNotInstalledError: transformers is missing.
    """

    def __init__(self, folder: str) -> None:
        with needed_by("the tokenizer of a model folder", "transformers"):
            from transformers import AutoTokenizer

        if not os.path.isdir(folder):
            raise ValueError(
                f"there is no model folder {folder!r}; give a local one in the Hugging Face layout"
            )
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            """The Hugging Face tokenizer."""
        except Exception as exc:  # transformers may raise any exception, without naming the folder
            reason = " ".join(str(exc).split())[:300] or type(exc).__name__
            raise ValueError(
                f"{folder!r} has no readable tokenizer in the Hugging Face layout: {reason}"
            ) from exc
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer in {folder!r} has no end token (eos_token), which answers need"
            )
        self.eos_id = int(self.tokenizer.eos_token_id)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, in the chat template if there is one."""
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            how = {"add_generation_prompt": True, "return_dict": False}
            return list(self.tokenizer.apply_chat_template(chat, **how))
        return list(self.tokenizer.encode(text))

    def encode_answer(self, text: str) -> list[int]:
        """Return the tokens of an answer and the end token."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write the tokenizer into a folder."""
        self.tokenizer.save_pretrained(str(folder))
