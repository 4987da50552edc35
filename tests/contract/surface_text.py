"""One line of text for a public name, from the living object and from the expected table, so that they can be compared.

A callable is its signature without annotations; a TypedDict is its fields; an error is what it can be caught as.
"""

from __future__ import annotations

import ast
import inspect
import typing
from types import ModuleType
from typing import Any

from expected_surface import ADDED, ADDED_FIELDS, DOCUMENTED, ERRORS, HOMES, MEMBERS, NEW, PATHS, RECORDS, VALUES

COVERED = sorted({*PATHS, *NEW})


class _Factory:
    def __repr__(self) -> str:
        return "<factory>"


def expected(path: str) -> dict[str, str]:
    """What the tables say about the module at `path`: each name with its text."""
    texts = {name: _documented_text(name) for name in (*PATHS.get(path, ()), *HOMES.get(path, ()))}
    if path == "errors":
        texts |= {name: f"error: {bases}" for name, bases in ERRORS.items()}
    texts |= {name: _canonical(text) for name, text in NEW.get(path, {}).items()}
    classes = [name for name in texts if name in MEMBERS]
    return texts | {f"{name}.{each}": _canonical(text) for name in classes for each, text in MEMBERS[name].items()}


def found(module: ModuleType) -> dict[str, str]:
    """What the module itself says: each public name, and each public method of its classes, with its text."""
    texts: dict[str, str] = {}
    for name in public_names(module):
        value = getattr(module, name)
        texts[name] = _text(value)
        if inspect.isclass(value):
            texts |= {f"{name}.{member}": _member_text(value, member) for member in _members(value)}
    return texts


def public_names(module: ModuleType) -> list[str]:
    """`__all__`, or the classes and functions that the module defines and does not mark as its own."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    defined = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    return [name for name, value in defined.items() if getattr(value, "__module__", None) == module.__name__]


def signature_from(text: str) -> inspect.Signature:
    """`(a, *, b="x"|"y", c=<factory>)` -> the signature it describes, with "x" as the default of b."""
    tree = ast.parse(f"def f{text.replace('<factory>', 'FACTORY')}: ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    listed = tree.args
    defaults = [inspect.Parameter.empty] * (len(listed.args) - len(listed.defaults)) + [*map(_value, listed.defaults)]
    parameters = [
        inspect.Parameter(each.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for each, default in zip(listed.args, defaults, strict=True)
    ]
    if listed.vararg is not None:
        parameters.append(inspect.Parameter(listed.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    parameters += [
        inspect.Parameter(
            each.arg,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is None else _value(default),
        )
        for each, default in zip(listed.kwonlyargs, listed.kw_defaults, strict=True)
    ]
    if listed.kwarg is not None:
        parameters.append(inspect.Parameter(listed.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _documented_text(name: str) -> str:
    if name in VALUES:
        return "value"
    if name in RECORDS and name not in ADDED:
        added = f", {ADDED_FIELDS[name]}" if name in ADDED_FIELDS else ""
        return f"record: {RECORDS[name].replace('|None', '')}{added}"
    text = f"({RECORDS[name]})" if name in RECORDS else DOCUMENTED[name]
    if name in ADDED:
        star = "" if "*, " in text else "*, "
        text = f"{text[:-1]}, {star}{ADDED[name]})"
    return _canonical(text)


def _canonical(text: str) -> str:
    return str(signature_from(text)) if text.startswith("(") else text


def _value(node: ast.expr) -> Any:
    while isinstance(node, ast.BinOp):  # "dpo"|"simpo": the first one is the default
        node = node.left
    return _Factory() if isinstance(node, ast.Name) else ast.literal_eval(node)


def _text(value: Any) -> str:
    if typing.is_typeddict(value):
        return "record: " + ", ".join(value.__annotations__)
    if inspect.isclass(value) and issubclass(value, BaseException):
        return "error: " + ", ".join(base.__name__ for base in value.__bases__)
    if getattr(value, "_is_protocol", False):
        return "protocol"
    return str(_bare_signature(value)) if callable(value) else "value"


def _member_text(owner: type, member: str) -> str:
    if isinstance(inspect.getattr_static(owner, member), property):
        return "property"
    unbound = inspect.isfunction(getattr(owner, member))
    return str(_bare_signature(getattr(owner, member), drop_self=unbound))


def _members(owner: type) -> list[str]:
    kinds = (property, classmethod, staticmethod)
    named = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
    return [name for name, value in named.items() if inspect.isfunction(value) or isinstance(value, kinds)]


def _bare_signature(value: Any, *, drop_self: bool = False) -> inspect.Signature:
    parameters = list(inspect.signature(value).parameters.values())[int(drop_self) :]
    return inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
