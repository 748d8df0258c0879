"""Shows ``generate = blocking(async_generate)`` in the API reference as the method that it is."""

from __future__ import annotations

from typing import Any

import griffe


class Blocking(griffe.Extension):
    """Replaces such class attributes by a copy of the async method, without ``async``."""

    def on_class_members(self, *, node: Any, cls: griffe.Class, **kwargs: Any) -> None:
        for name, member in list(cls.members.items()):
            call = member.value if isinstance(member, griffe.Attribute) else None
            if (
                not isinstance(call, griffe.ExprCall)
                or str(call.function) != "blocking"
                or len(call.arguments) != 1
            ):
                continue
            core = cls.members.get(str(call.arguments[0]))
            if not isinstance(core, griffe.Function):
                continue
            method = griffe.Function(
                name,
                lineno=member.lineno,
                endlineno=member.endlineno,
                parameters=core.parameters,
                returns=core.returns,
                docstring=core.docstring,
            )
            method.labels.add("blocking")
            cls.set_member(name, method)
