"""CEL from Python: the source of a predicate over the specification as a condition of the API server.

A predicate is a function with one expression over attributes of its argument, a model: comparisons, `and`, `or`,
`not`, `in`, `*`, `%`, `//`, `is None`, and properties with the same limits. Constants are evaluated. An attribute with
a default becomes `.?field.orValue(DEFAULT)`, because API servers do not fill in defaults.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_OPERATORS: Mapping[type[ast.AST], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Is: "==", ast.IsNot: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=", ast.In: "in", ast.Mult: "*", ast.Mod: "%", ast.FloorDiv: "/", ast.And: "&&", ast.Or: "||",
}  # fmt: skip


def literal(text: str) -> str:
    """Return a text as a CEL literal."""
    return json.dumps(text, ensure_ascii=False)


def listed(words: Iterable[str]) -> str:
    """Return words without special characters as a CEL list."""
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


def optional(model: type[BaseModel], name: str, of: str = "self") -> str:
    """Return the field `name` of the object `of`, or its default if it is absent."""
    field = model.model_fields[name]
    # As a user would write it: durations and quantities are numbers in Python.
    default = model.model_construct().model_dump(mode="json", include={name})[name]
    return f"{of}.?{field.alias or name}.orValue({_constant(default)})"


def condition(predicate: Callable[[Any], bool], places: Mapping[str, tuple[Any, str, bool]] | None = None) -> str:
    """Return the predicate in CEL.

    Args:
        predicate: a function of one argument.
        places: parts of the argument (`request.spec`), each with its model, its path in CEL, and whether all fields
            are present; by default the argument itself is `self`.

    Raises:
        ValueError: the predicate is not one expression, or has a part without an equivalent in CEL.
    """
    (argument,) = inspect.signature(predicate).parameters
    if places is None:
        found = {argument: _Place(get_type_hints(predicate)[argument], "self")}
    else:
        found = {name: _Place(model, path, complete=complete) for name, (model, path, complete) in places.items()}
    return _Translator(predicate, found).expression(_returned(predicate))


def _returned(function: Callable[..., Any]) -> ast.expr:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    last = definition.body[-1] if isinstance(definition, ast.FunctionDef) else None
    if not isinstance(last, ast.Return) or last.value is None:
        raise ValueError(f"{function.__qualname__} does not return one expression")
    return last.value


def _constant(value: object) -> str:
    if isinstance(value, Enum | str):
        return f"'{value}'"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_constant, value)) + "]"
    return json.dumps(value)


@dataclass(frozen=True)
class _Place:
    """A part of the object."""

    kind: Any
    """Its model, or its type."""
    path: str
    """Path in CEL without defaults, `self.engine.maxModelLen`."""
    lazy: str = ""
    """The same with `.?` from the first field that may be absent; empty: all are present."""
    absent: tuple[str, ...] = ()
    """Fields on the path that may be absent."""
    default: object = None
    complete: bool = False
    """All fields are present."""

    def field(self, name: str, info: FieldInfo) -> _Place:
        """Return a field of this part."""
        alias = info.alias or name
        path = f"{self.path}.{alias}"
        if self.complete:
            return _Place(info.annotation, path, complete=True)
        kind = next(iter(getattr(info.annotation, "__args__", ())), info.annotation)
        lazy = f"{self.lazy or self.path}.?{alias}" if self.lazy or not info.is_required() else ""
        absent = self.absent if info.is_required() else (*self.absent, path)
        return _Place(kind, path, lazy, absent, None if info.is_required() else info.default)

    @property
    def value(self) -> str:
        """Return the value or its default in CEL; without a default the predicate has to check its presence."""
        return (
            f"{self.lazy}.orValue({_constant(self.default)})" if self.lazy and self.default is not None else self.path
        )


class _Translator:
    """Translates expressions of one function."""

    def __init__(self, function: Callable[..., Any], places: Mapping[str, _Place]) -> None:
        self._places = places
        known = inspect.getclosurevars(function)
        self._names = {**known.builtins, **known.globals, **known.nonlocals}

    def expression(self, node: ast.expr) -> str:
        """Return `node` in CEL."""
        match node:
            case ast.BoolOp(op, values):
                return f" {_OPERATORS[type(op)]} ".join(self._operand(value, ast.BoolOp) for value in values)
            case ast.UnaryOp(ast.Not(), operand):
                return f"!({self.expression(operand)})"
            case ast.Compare(left, [operator], [ast.Constant(None)]) if isinstance(operator, ast.Is | ast.IsNot):
                return self._presence(left, present=isinstance(operator, ast.IsNot))
            case ast.Compare(left, [ast.NotIn()], [right]):
                return f"!({self._operand(left)} in {self._operand(right)})"
            case ast.Compare(left, [operator], [right]) if type(operator) in _OPERATORS:
                return f"{self._operand(left)} {_OPERATORS[type(operator)]} {self._operand(right)}"
            case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
                return f"{self._operand(left)} {_OPERATORS[type(operator)]} {self._operand(right, ast.BinOp)}"
            case ast.IfExp(ast.Compare(tested, [ast.Is()], [ast.Constant(None)]), other, value) if ast.dump(
                tested
            ) == ast.dump(value) and (place := self._found(value)):
                return f"{place.lazy}.orValue({self.expression(other)})"
            case ast.IfExp(test, value, other):
                return f"({self.expression(test)} ? {self.expression(value)} : {self.expression(other)})"
        if place := self._found(node):
            return place.value
        if isinstance(node, ast.Attribute) and (inlined := self._property(node)):
            return inlined
        return _constant(self._evaluated(node))

    def _operand(self, node: ast.expr, *bracketed: type[ast.expr]) -> str:
        text = self.expression(node)
        is_property = isinstance(node, ast.Attribute) and self._found(node) is None and "*" in text
        return f"({text})" if isinstance(node, bracketed) or (is_property and bracketed) else text

    def _found(self, node: ast.expr) -> _Place | None:
        """Return the part to which an attribute of the argument refers; None for any other expression."""
        if place := self._places.get(ast.unparse(node)):
            return place
        if not isinstance(node, ast.Attribute) or (outer := self._found(node.value)) is None:
            return None
        field = outer.kind.model_fields.get(node.attr)
        return outer.field(node.attr, field) if field is not None else None

    def _property(self, node: ast.Attribute) -> str | None:
        """Return a property of a part as its expression."""
        outer = self._found(node.value)
        getter = getattr(getattr(outer.kind, node.attr, None), "fget", None) if outer is not None else None
        if outer is None or getter is None:
            return None
        return _Translator(getter, {"self": outer}).expression(_returned(getter))

    def _presence(self, node: ast.expr, *, present: bool) -> str:
        place = self._found(node)
        if place is None or not place.absent:
            raise ValueError(f"{ast.unparse(node)} is always present")
        parts = [f"{'' if present else '!'}has({path})" for path in place.absent]
        text = (" && " if present else " || ").join(parts)
        return f"({text})" if present and len(parts) > 1 else text

    def _evaluated(self, node: ast.expr) -> object:
        """Return the value of a constant expression."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name) if name in self._names:
                return self._names[name]
            case ast.Attribute(inner, name):
                return getattr(self._evaluated(inner), name)
            case ast.Tuple(elements):
                return tuple(map(self._evaluated, elements))
        raise ValueError(f"{ast.unparse(node)} has no equivalent in CEL")
