"""Reading of YAML as users mean it."""

from __future__ import annotations

import re
from typing import Any

_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+$")


def read_yaml(text: str) -> Any:
    """Read a YAML or JSON document with PyYAML's safe types.

    Numbers such as 1e-6 are numbers, which PyYAML itself takes for texts.

    Args:
        text: The document.

    Returns:
        Its plain value.

    Raises:
        ModuleNotFoundError: PyYAML is missing.
        yaml.YAMLError: The text is not YAML, or has a key twice, of which PyYAML itself drops the
            first.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
                if name in seen:
                    raise yaml.MarkedYAMLError(
                        "while reading keys and values",
                        node.start_mark,
                        f"the key {key.value!r} is given twice",
                        key.start_mark,
                    )
                seen.add(name)
            return node

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    return yaml.load(text, Loader)
