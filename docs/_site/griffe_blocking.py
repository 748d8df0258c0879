"""Shows ``generate = blocking(async_generate)`` in the API reference as the method that it is."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Blocking(griffe.Extension):
    """Replaces class attributes of this form by a copy of the async method's signature and docstring, without ``async``."""

    def on_class_members(self, *, node: Any, cls: griffe.Class, **kwargs: Any) -> None:
        for name, member in list(cls.members.items()):
            call = member.value if isinstance(member, griffe.Attribute) else None
            if not isinstance(call, griffe.ExprCall) or str(call.function) != "blocking" or len(call.arguments) != 1:
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
            cls.set_member(name, method)


def assigned(source: str) -> dict[str, list[str]]:
    """Class -> names of its blocking forms, read from a module's source; the test of the reference compares with it."""
    return {
        node.name: [
            str(ast.unparse(each.targets[0]))
            for each in node.body
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call) and ast.unparse(each.value.func) == "blocking"
        ]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
