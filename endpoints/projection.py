"""The payload boundary: cut a payload to its type's limits and to a size, without changing what is not cut. Pure.

The event type's JSON Schema says with the annotation `x-class` what a field is:

| class | limit | over it |
|---|---|---|
| `identifier`, `key`, `label` | 256 characters | left out: a shortened one would be another one |
| `email` / `phone` | 320 / 32 characters | left out |
| `text` | 8,192 bytes of UTF-8 | cut at a character boundary |
| `collection`: an array, or an object that is a map | 100 elements | loses elements from its tail |
| `excluded` | never sent | left out, also when required |

1. These limits come first. A required field that would be left out takes the nearest optional member or element around
   it along; where there is none, it is a projection gap.
2. Then the whole has to fit. Optional content shrinks, the last in the document first: collections lose elements, texts
   are cut, then members are left out whole: those with a class, the others that the schema knows, those that it does
   not know. A required collection or text may become empty but stays. What would not get shorter (a pointer to it takes
   room, too) is left alone. If all that is not enough, it is a projection gap.
3. `truncation` becomes the last member, in place of one the caller sent. Its `omittedFields` are JSON pointers (RFC
   6901) into the payload as it was sent, in document order, of what was cut or left out; not of excluded fields, which
   are no content that was too long, and not of anything inside a field that is listed as left out itself.

All that is not cut keeps its bytes; only the white space between the members of a container that lost something goes.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

MAX_CHARACTERS = {"identifier": 256, "key": 256, "label": 256, "email": 320, "phone": 32}
MAX_TEXT_BYTES = 8192
MAX_ELEMENTS = 100
CLASSES = frozenset({*MAX_CHARACTERS, "text", "collection", "excluded"})

MAX_SCHEMA_DEPTH = 10
MAX_SCHEMA_PROPERTIES = 500


class Projection(NamedTuple):
    """What is sent: `data`, and the JSON pointers of its `truncation.omittedFields`."""

    data: bytes
    omitted: tuple[str, ...]


class ProjectionGap(ValueError):
    """Even the minimum does not fit. `pointer` (RFC 6901) names the field and is empty for the whole."""

    def __init__(self, pointer: str, detail: str) -> None:
        super().__init__(detail)
        self.pointer = pointer


def project(payload: bytes, schema: Mapping[str, object], *, max_bytes: int) -> Projection:
    """Cut a payload, a JSON object that `payloads.check` has accepted, by a schema that `check_schema` has accepted.

    The result is at most `max_bytes` long and depends on nothing but the arguments. Raises `ProjectionGap`.
    """
    document = _Document(payload.strip(b" \t\r\n"), schema, max_bytes)
    document.apply_limits()
    document.fit()
    return document.result()


# --- the schema -----------------------------------------------------------------------------------------------------


def check_schema(schema: object) -> None:
    """Raise ValueError, with one sentence, for a schema that `project` could not follow."""
    if not isinstance(schema, Mapping) or "x-class" in schema:
        raise ValueError(
            "The schema must be a JSON object without x-class at its top; describe the fields in properties."
        )
    if _check_schema(schema, "", 1) > MAX_SCHEMA_PROPERTIES:
        raise ValueError(f"The schema has more than {MAX_SCHEMA_PROPERTIES} properties; describe fewer.")


def _check_schema(schema: object, place: str, depth: int) -> int:
    """Check one level and those below; returns how many properties it has."""
    if isinstance(schema, bool):
        return 0
    if not isinstance(schema, Mapping):
        raise ValueError(f"The schema at {place!r} must be an object, true or false.")
    if depth > MAX_SCHEMA_DEPTH:
        raise ValueError(f"The schema at {place!r} nests deeper than {MAX_SCHEMA_DEPTH} levels; flatten it.")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ValueError(f"The schema at {place!r} must have an object as its properties.")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"The schema at {place!r} must have a list of names as required.")
    _check_class(schema, place)
    below = [(f"/{_escaped(str(name))}", part) for name, part in properties.items()]
    below += [(f"/{name}", schema[name]) for name in ("items", "additionalProperties") if name in schema]
    return len(properties) + sum(_check_schema(part, place + name, depth + 1) for name, part in below)


def _check_class(schema: Mapping[str, object], place: str) -> None:
    kind = schema.get("x-class")
    if "x-class" in schema and not (isinstance(kind, str) and kind in CLASSES):
        raise ValueError(
            f"The schema at {place!r} has the unknown x-class {kind!r}; use one of {', '.join(sorted(CLASSES))}."
        )
    if kind == "collection" and ("properties" in schema or "required" in schema):
        raise ValueError(
            f"The schema at {place!r} names members of a collection, whose elements may all be cut; "
            "describe them in items or additionalProperties, or take x-class away."
        )
    if kind != "collection" and _has_class(schema.get("items")):
        raise ValueError(f"The schema at {place!r} has classes in items; give the array the x-class collection.")
    unread = schema.keys() - {
        "x-class",
        "properties",
        "items",
        "additionalProperties",
        "const",
        "enum",
        "default",
        "examples",
    }
    if hidden := sorted(str(name) for name in unread if _has_class(schema[name])):
        raise ValueError(
            f"The schema at {place!r} has an x-class inside {hidden[0]}, which is not read; use properties."
        )


def _has_class(schema: object) -> bool:
    if isinstance(schema, Mapping):
        return "x-class" in schema or any(map(_has_class, schema.values()))
    return isinstance(schema, list) and any(map(_has_class, schema))


# --- JSON text ------------------------------------------------------------------------------------------------------

_SPACE = rb"[ \t\r\n]*"
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_START = re.compile(rb"[\[{]" + _SPACE)
_HEAD = re.compile(_STRING + _SPACE + rb":" + _SPACE)
_GAP = re.compile(_SPACE + rb",?" + _SPACE)
_SCALAR = re.compile(_STRING + rb"|[^,\]} \t\r\n]+")
_BRACKET = re.compile(_STRING + rb"|[\[\]{}]")


def _parts(container: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The parts of a sound object or array: a member's name with its colon (nothing in an array), and the value."""
    named = container.startswith(b"{")
    at = _end(_START, container, 0)
    while container[at] not in b"]}":
        start = _end(_HEAD, container, at) if named else at
        end = _end_of_value(container, start)
        yield container[at:start], container[start:end]
        at = _end(_GAP, container, end)


def _end_of_value(text: bytes, at: int) -> int:
    if text[at] not in b"[{":
        return _end(_SCALAR, text, at)
    depth = 0
    for token in _BRACKET.finditer(text, at):
        if (mark := token[0]) in (b"[", b"{"):
            depth += 1
        elif mark in (b"]", b"}"):
            depth -= 1
            if depth == 0:
                return token.end()
    raise ValueError("the payload is not sound JSON")


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    if found := pattern.match(text, at):
        return found.end()
    raise ValueError("the payload is not sound JSON")


def _string(value: bytes) -> str | None:
    return str(json.loads(value)) if value.startswith(b'"') else None


def _json(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# --- the document ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Node:
    """A value that may be cut. `size` counts its bytes as they stand, with those of the pointers listed for it."""

    order: int
    parent: "_Node | None"
    pointer: str
    head: bytes
    value: bytes
    kind: object
    optional: bool
    known: bool
    element: bool  # in a collection, at any depth
    size: int
    children: "dict[int, _Node] | None" = None  # by order; None where nothing inside is looked at
    rebuilt: bool = False
    too_many: bool = False
    removed: bool = False
    listed: bool = False
    lists: bool = False  # something in it is or was listed

    @property
    def gone(self) -> bool:
        return self.removed or (self.parent is not None and self.parent.gone)

    @property
    def note(self) -> int:
        """The room that a pointer to this takes in the list, with its comma."""
        return len(_json(self.pointer)) + 1

    def text(self) -> bytes:
        if not self.rebuilt or self.children is None:
            return self.value
        inside = b",".join(child.head + child.text() for child in self.children.values())
        return self.value[:1] + inside + self.value[-1:]

    def grow(self, difference: int, *, listing: bool = False) -> None:
        node: _Node | None = self
        while node is not None:
            node.size += difference
            node.lists = node.lists or listing
            node = node.parent

    def open(self) -> None:
        """From now on this container and those around it are put together anew, without the white space in them."""
        if self.rebuilt:
            return
        self.rebuilt = True
        if self.children is not None:
            content = sum(len(child.head) + child.size for child in self.children.values())
            self.grow(2 + content + max(0, len(self.children) - 1) - self.size)
        if self.parent is not None:
            self.parent.open()

    def mark(self) -> None:
        if not self.listed:
            self.listed = True
            self.grow(self.note, listing=True)

    def cut_text(self, value: bytes) -> None:
        if self.parent is not None:
            self.parent.open()
        self.grow(len(value) - len(self.value))
        self.value = value
        self.mark()

    def remove(self) -> None:
        """Leave this out of what is around it, with a pointer to it in place of those into it."""
        assert self.parent is not None
        self.parent.drop(self)
        self.listed = True
        self.parent.grow(self.note, listing=True)

    def drop(self, child: "_Node") -> None:
        assert self.children is not None
        self.open()
        del self.children[child.order]
        child.removed, child.listed = True, False
        self.grow(-(len(child.head) + child.size + (1 if self.children else 0)))


class _Document:
    """A payload as a tree of what the schema can reach, and the total of its bytes kept up to date."""

    def __init__(self, payload: bytes, schema: Mapping[str, object], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nodes: list[_Node] = []  # in document order
        self.stripped: list[_Node] = []  # containers with parts that were not loaded: excluded or too many
        self.root = _Node(0, None, "", b"", payload, None, optional=False, known=True, element=False, size=len(payload))
        self._load(self.root, schema)
        for node in self.stripped:
            node.open()

    def _load(self, node: _Node, schema: object) -> None:
        """Take up a node and, where the schema says something about them, its parts."""
        self.nodes.append(node)
        rules = schema if isinstance(schema, Mapping) else {}
        if node.parent is not None and not _is_walked(node.value, rules):
            return
        node.children = {}
        required = frozenset(_names(rules.get("required")))
        parts = _parts(node.value)
        for index, (head, value) in enumerate(islice(parts, MAX_ELEMENTS if node.kind == "collection" else None)):
            name = json.loads(head[: head.rindex(b'"') + 1]) if head else None
            known, below = _schema_below(rules, name)
            kind = below.get("x-class") if isinstance(below, Mapping) else None
            if kind == "excluded" or (node.parent is None and name == "truncation"):
                self.stripped.append(node)
                continue
            child = _Node(
                len(self.nodes),
                node,
                f"{node.pointer}/{index if name is None else _escaped(name)}",
                head,
                value,
                kind,
                optional=name not in required,
                known=known,
                element=node.element or node.kind == "collection",
                size=len(value),
            )
            node.children[child.order] = child
            self._load(child, below)
        if next(parts, None):
            node.too_many = True
            self.stripped.append(node)

    def apply_limits(self) -> None:
        """The limits of the classes, in document order."""
        for node in self.nodes:
            if not node.kind or node.gone:
                continue
            if node.too_many:
                node.mark()
            text = _string(node.value)
            if node.kind == "text" and text is not None:
                content = text.encode()
                if len(content) > MAX_TEXT_BYTES:
                    node.cut_text(_json(content[:MAX_TEXT_BYTES].decode(errors="ignore")))
            elif node.kind in MAX_CHARACTERS:
                length = len(node.value.decode() if text is None else text)
                if length > MAX_CHARACTERS[str(node.kind)]:
                    self._leave_out(node, length)

    def fit(self) -> None:
        """Shrink optional content until the whole fits."""
        whole = [node for node in self.nodes if not node.element]
        optional = [node for node in whole if node.optional]
        steps: list[tuple[Callable[[_Node], None], list[_Node]]] = [
            (self._drop_elements, [node for node in whole if node.kind == "collection" and node.children]),
            (self._shorten, [node for node in whole if node.kind == "text" and node.value[:1] == b'"']),
            (self._remove, [node for node in optional if node.kind]),
            (self._remove, [node for node in optional if not node.kind and node.known]),
            (self._remove, [node for node in optional if not node.known]),
        ]
        for shrink, nodes in steps:
            for node in reversed(nodes):
                if self._excess() <= 0:
                    return
                if not node.gone:
                    shrink(node)
        if self._excess() > 0:
            raise ProjectionGap(
                "",
                f"What must be sent is {self._excess():,} bytes over the limit of {self.max_bytes:,}; "
                "send less, or make more of its fields optional in the schema.",
            )

    def result(self) -> Projection:
        omitted = tuple(node.pointer for node in self.nodes if node.listed and not (node.parent and node.parent.gone))
        pointers = b",".join(map(_json, omitted))
        comma = b"," if self.root.children else b""
        return Projection(self.root.text()[:-1] + comma + _TRUNCATION % pointers + b"}", omitted)

    def _excess(self) -> int:
        """How many bytes too long the result would be. The pointers are in the root's size, each with a comma."""
        commas = bool(self.root.children) - self.root.lists
        return self.root.size + len(_TRUNCATION % b"") + commas - self.max_bytes

    def _leave_out(self, node: _Node, length: int) -> None:
        limit = MAX_CHARACTERS[str(node.kind)]
        optional: _Node | None = node
        while optional is not None and not optional.optional:
            optional = optional.parent
        if optional is None:
            raise ProjectionGap(
                node.pointer,
                f"The required {node.kind} at {node.pointer} is {length:,} characters long and the limit is {limit}; "
                "send a shorter one.",
            )
        optional.remove()

    def _drop_elements(self, node: _Node) -> None:
        if node.size <= 2 + node.note:
            return
        while node.children and self._excess() > 0:
            node.drop(node.children[next(reversed(node.children))])
            node.mark()

    def _shorten(self, node: _Node) -> None:
        if node.size <= 2 + node.note:
            return
        node.cut_text(node.value)
        text = str(json.loads(node.value))
        room = len(node.value) - self._excess()
        characters = bisect_right(range(len(text)), room, key=lambda end: len(_json(text[:end]))) - 1
        node.cut_text(_json(text[: max(0, characters)]))

    def _remove(self, node: _Node) -> None:
        if len(node.head) + node.size > node.note:
            node.remove()


_TRUNCATION = b'"truncation":{"omittedFields":[%b]}'


def _is_walked(value: bytes, rules: Mapping[str, object]) -> bool:
    """Whether something inside may be cut. `check_schema` sees to it that of arrays this can only be a collection."""
    if rules.get("x-class") == "collection":
        return value[:1] in (b"{", b"[")
    return value[:1] == b"{" and ("properties" in rules or isinstance(rules.get("additionalProperties"), Mapping))


def _names(required: object) -> list[str]:
    return required if isinstance(required, list) else []


def _schema_below(rules: Mapping[str, object], name: str | None) -> tuple[bool, object]:
    """The schema of a member, or of an element where there is no name, and whether there is one."""
    properties = rules.get("properties")
    if name is not None and isinstance(properties, Mapping) and name in properties:
        return True, properties[name]
    below = rules.get("items" if name is None else "additionalProperties")
    return isinstance(below, Mapping), below
