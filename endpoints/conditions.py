"""Conditions of conditional destinations: Common Expression Language (CEL) over an event, with bounded work. Pure.

By Google's own implementation, `cel-expr-python`: of the three on PyPI it alone checks types before it runs, counts its
iterations, limits nesting, returns errors as values and depends on nothing. (`common-expression-language` has no such
limits and brings five libraries for its command line; `cel-python` is an interpreter in Python without limits.)

A condition knows `event.id`, `event.type` and `event.time` (texts) and `event.data` (JSON), the operators of CEL, its
functions but `matches`, and the macros `has`, `all`, `exists` and `exists_one`. The limits below keep the work about
linear in the event: nothing else of the process runs meanwhile. The slowest condition found under them takes 0.1 s over
256 KiB, a usual one less than 20 ms.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cel_expr_python import cel

MAX_CHARACTERS = 500
"""Longest condition, in characters: `1 in event.data || ...` twenty-five times over 130,000 elements takes 0.1 s."""

MAX_NODES = 40
"""Most terms inside `all`, `exists` and `exists_one`, which are worked out for each element: 40 over 10,000 elements
take 20 ms, 450 take 0.3 s."""

# Measured under the library's own budget of 10,000 iterations for one evaluation: `filter` copies its result at every
# step (5.3 s), `map` does too (3.0 s) and a chain of `map(x, x + x)` doubles without end, and a pattern of 103
# characters keeps RE2 busy for 21 s.
_ENVIRONMENT = cel.NewEnv(
    config=cel.NewEnvConfigFromYaml(
        "{stdlib: {exclude_macros: [map, filter], exclude_functions: [{name: matches}]}}",
    ),
    variables={
        "event.id": cel.Type.STRING,
        "event.type": cel.Type.STRING,
        "event.time": cel.Type.STRING,
        "event.data": cel.Type.DYN,
    },
)
_INSTEAD = {
    "map": "use all, exists or exists_one",
    "filter": "use all, exists or exists_one",
    "matches": "use startsWith, endsWith or contains",
}
_VARIABLES = ("id", "type", "time", "data")
_INT64 = range(-(2**63), 2**63)
_INT64_CHARACTERS = 20

_PLACED = re.compile(r"<input>:(\d+):(\d+): (.+)")
_EXCLUDED = re.compile(r"<input>:(\d+):(\d+): undeclared reference to '(map|filter|matches)'")


class ConditionError(ValueError):
    """A condition is refused; the text is one sentence for people, with the place if known: line and column, from 1."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A checked condition. It may be used by several threads and for any number of events."""

    text: str
    _expression: Any = field(repr=False, compare=False)

    def explain(self, event: Mapping[str, object]) -> tuple[bool, str]:
        """Whether the condition is true for an event with `id`, `type`, `time` and `data` (see `read_data`), and the
        reason in one short sentence that never shows a whole event. A missing member, values of the wrong type and
        every other error mean False.
        """
        try:
            result = self._expression.eval(data={f"event.{name}": event[name] for name in _VARIABLES if name in event})
            kind, value = result.type(), result.value()
        except (RuntimeError, TypeError, ValueError, RecursionError) as error:
            return False, _failure(str(error))
        if kind == cel.Type.ERROR:
            return False, _failure(str(value))
        if kind != cel.Type.BOOL:
            return False, f"The condition gives {kind.name()}, not true or false."
        return (True, "The condition is true.") if value else (False, "The condition is false.")


@functools.lru_cache(maxsize=1_000)
def compile_condition(text: str) -> Condition:
    """Check a condition and make it ready. Raises `ConditionError` for what is no CEL, knows other variables, cannot be
    true or false, or would make the work unbounded.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConditionError(
            f"The condition has {len(text):,} characters and the limit is {MAX_CHARACTERS:,}; "
            "shorten it, or split it into several rules."
        )
    try:
        expression = _ENVIRONMENT.compile(text)
    except (RuntimeError, TypeError) as error:
        raise ConditionError(_refusal(str(error))) from None
    kind = expression.return_type()
    if kind not in (cel.Type.BOOL, cel.Type.DYN):
        raise ConditionError(
            f"The condition gives {kind.name()}, not true or false; compare it, as in event.data.status == 'won'."
        )
    _check_work(_syntax_tree(expression.serialize()))
    return Condition(text, expression)


def read_data(payload: bytes) -> object:
    """Read a payload for `event.data`. An integer beyond 64 bits, which CEL does not have, becomes the nearest double.
    Raises ValueError for what is not JSON or is nested too deep for Python's own reader.
    """
    try:
        return json.loads(payload, parse_int=_number)
    except RecursionError:
        raise ValueError("The payload nests too deep for conditions; flatten it.") from None


def _number(digits: str) -> int | float:
    if len(digits) <= _INT64_CHARACTERS and int(digits) in _INT64:
        return int(digits)
    return float(digits)


def _failure(text: str) -> str:
    """The library's words about an evaluation. Where it shows a value that it cannot take, it shows the whole event."""
    if "Iteration budget" in text:
        return "The condition was given up: it looks at more than 10,000 elements of the event."
    if " -> " in text:
        return "The condition could not be evaluated: the event has a value that CEL does not know."
    return f"The condition could not be evaluated: {text.split(': ', 1)[-1].removesuffix(' [INTERNAL]')[:200]}."


def _refusal(text: str) -> str:
    """One sentence of the library's words about a condition that it refused."""
    if found := _EXCLUDED.search(text):
        line, column, name = found.groups()
        return f"The condition uses {name} at line {line}, column {column}, whose work has no bound; {_INSTEAD[name]}."
    if "recursion" in text:
        return "The condition nests deeper than 32 levels; simplify it."
    found = _PLACED.search(text)
    if found is None:
        return "The condition is not text that CEL can read; write it in Unicode characters."
    line, column, words = found.groups()
    words = words.partition(" expecting ")[0].partition(" (in container")[0]
    hint = "; a condition knows event.id, event.type, event.time and event.data" if "undeclared" in words else ""
    return f"The condition has an error at line {line}, column {column}: {words}{hint}."


# --- the syntax tree ------------------------------------------------------------------------------------------------
# The library shows its tree only as a protobuf message, cel.expr.CheckedExpr (cel/expr/checked.proto and
# syntax.proto in the CEL specification). These are the field numbers needed, and the wire format.

_ANY_VALUE, _CHECKED_EXPR = 2, 4
_CONSTANT, _IDENTIFIER, _SELECT, _CALL, _LIST, _STRUCT, _COMPREHENSION = range(3, 10)
_CHILDREN = {_SELECT: {1}, _CALL: {1, 3}, _LIST: {1}, _COMPREHENSION: {2, 4, 5, 6, 7}}
_NAME, _FUNCTION, _ARGUMENT, _ENTRY, _ENTRY_PARTS, _LOOP_STEP = 1, 2, 3, 2, {3, 4}, 6

_Node = tuple[int, list[tuple[int, bytes]]]


def _check_work(tree: bytes) -> None:
    """Raise `ConditionError` for what would multiply the event's size with itself."""
    for kind, fields in _nodes(tree):
        if kind == _COMPREHENSION:
            _check_body(next(content for number, content in fields if number == _LOOP_STEP))
        if kind == _CALL and (_FUNCTION, b"contains") in fields:
            argument = [content for number, content in fields if number == _ARGUMENT][-1]
            if next(_nodes(argument))[0] != _CONSTANT:  # 0.1 s for two texts of 128 KiB, and 25 fit into a condition
                raise ConditionError("The condition searches for a text that is not fixed; give contains a literal.")


def _check_body(body: bytes) -> None:
    nodes = list(_nodes(body))
    if len(nodes) > MAX_NODES:
        raise ConditionError(
            f"The condition has {len(nodes)} terms inside all, exists or exists_one, and the limit is {MAX_NODES}; "
            "compare with fewer values, or split it into several rules."
        )
    for kind, fields in nodes:
        if kind == _COMPREHENSION:
            raise ConditionError(
                "The condition has all, exists or exists_one inside another one; combine them with && or ||."
            )
        if kind == _IDENTIFIER and dict(fields)[_NAME].split(b".")[0] == b"event":
            raise ConditionError(  # `x in event.data.list` for each x: 48 s
                "The condition looks at event inside all, exists or exists_one; only the element may stand there."
            )


def _syntax_tree(serialized: bytes) -> bytes:
    return dict(_fields(dict(_fields(serialized))[_ANY_VALUE]))[_CHECKED_EXPR]


def _nodes(expression: bytes) -> Iterator[_Node]:
    """An expression and all inside it: kind and fields. As deep as the library's limit of 32 levels allows."""
    for kind, content in _fields(expression):
        if not _CONSTANT <= kind <= _COMPREHENSION:
            continue
        fields = list(_fields(content))
        yield kind, fields
        for number, child in fields:
            if number in _CHILDREN.get(kind, ()):
                yield from _nodes(child)
            elif kind == _STRUCT and number == _ENTRY:
                for part, value in _fields(child):
                    if part in _ENTRY_PARTS:
                        yield from _nodes(value)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protobuf message: number and content; of fields that hold a number, the content is empty."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        size = 0
        match key & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(message, at)
            case 5:
                at += 4
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
