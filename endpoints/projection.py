"""The payload boundary: cut a payload to its type's limits and to a size, without changing what is not cut. Pure.

Every value has a class, and with it a limit:

| class | limit | over it |
|---|---|---|
| `identifier`, `key`, `label` | 256 characters | left out: a shortened one would be another one |
| `email` / `phone` | 320 / 32 characters | left out |
| `text`: a string that nothing is said about | 8,192 bytes of UTF-8 | cut at a character boundary |
| `collection`: an array, or an object whose members the schema does not name | 100 elements | loses its tail |
| `excluded` | never sent | left out, also when required |

The event type's JSON Schema gives classes: `x-class` that of a field; `x-classes`, at its top, those of all members of
a name, wherever they are and the schema says nothing else (names are compared without case, `_` and `-`). An array or
object of an `email`, say, passes its class on to what is in it.

1. These limits come first. A required field that would be left out takes the nearest optional member or element around
   it along; where there is none, it is a projection gap.
2. Then the whole has to fit. White space goes first. Then optional content shrinks, the last in the document first:
   collections lose elements, texts are cut, then members are left out whole. A required collection or text may become
   empty but stays. What would not get shorter (a pointer to it takes room, too) is left alone. If all that is not
   enough, it is a projection gap.
3. `truncation` becomes the last member, in place of one the caller sent. Its `omittedFields` are JSON pointers (RFC
   6901) into the payload as it was sent, in document order, of what was cut or left out; not of excluded fields, which
   are no content that was too long, and not of anything inside a field that is listed as left out itself. A place whose
   pointer would be longer than 1,024 characters is told of by that of what is around it.

All that is not cut keeps its bytes. The white space between the members of a container goes when it lost something.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from webhookhub.pointers import escaped

MAX_CHARACTERS = {"identifier": 256, "key": 256, "label": 256, "email": 320, "phone": 32}
MAX_TEXT_BYTES = 8192
MAX_ELEMENTS = 100
CLASSES = frozenset({*MAX_CHARACTERS, "text", "collection", "excluded"})

NAMED_CLASSES = CLASSES - {"collection"}

MAX_SCHEMA_DEPTH = 10
MAX_SCHEMA_PROPERTIES = 500
MAX_POINTER_CHARACTERS = 1024  # or deep payloads with long names would make lists far larger than themselves


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

    It nests at most 500 deep, half of what Python's stack takes. The result is at most `max_bytes` long and depends on
    nothing but the arguments. Raises `ProjectionGap`.
    """
    document = _Document(payload.strip(_SPACES), schema, max_bytes)
    if document.excess() > 0:
        document = _Document(_SPACE_OUTSIDE.sub(rb"\1", payload), schema, max_bytes, to_shrink=True)
        document.fit()
    return document.result()


# --- the schema -----------------------------------------------------------------------------------------------------


def check_schema(schema: object) -> None:
    """Raise ValueError, with one sentence, for a schema that `project` could not follow."""
    if not isinstance(schema, Mapping) or "x-class" in schema:
        raise ValueError(
            "The schema must be a JSON object without x-class at its top; describe the fields in properties."
        )
    names = schema.get("x-classes", {})
    if not isinstance(names, Mapping) or len(names) > MAX_SCHEMA_PROPERTIES:
        raise ValueError(
            f"x-classes must be an object of at most {MAX_SCHEMA_PROPERTIES} names, each with the class of its members."
        )
    for name, kind in names.items():
        if not (isinstance(kind, str) and kind in NAMED_CLASSES):
            raise ValueError(
                f"x-classes gives {name!r} the unknown class {kind!r}; use one of {', '.join(sorted(NAMED_CLASSES))}."
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
    if place and "x-classes" in schema:
        raise ValueError(f"The schema at {place!r} has x-classes, which stand at its top alone; move them there.")
    _check_class(schema, place)
    below = [(f"/{escaped(str(name))}", part) for name, part in properties.items()]
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

_SPACES = b" \t\r\n"
_SPACE = rb"[ \t\r\n]*"
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_START = re.compile(rb"[\[{]" + _SPACE)
_HEAD = re.compile(_STRING + _SPACE + rb":" + _SPACE)
_GAP = re.compile(_SPACE + rb",?" + _SPACE)
_SCALAR = re.compile(_STRING + rb"|[^,\]} \t\r\n]+")
_BRACKET = re.compile(_STRING + rb"|[\[\]{}]")
_SPACE_OUTSIDE = re.compile(rb"(" + _STRING + rb")|[ \t\r\n]+")


def _ends(text: bytes) -> dict[int, int]:
    """Where each object and array of sound JSON ends, by where it begins."""
    ends, begun = {}, []
    for token in _BRACKET.finditer(text):
        if (mark := token[0]) in (b"[", b"{"):
            begun.append(token.start())
        elif mark in (b"]", b"}"):
            ends[begun.pop()] = token.end()
    return ends


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    if found := pattern.match(text, at):
        return found.end()
    raise ValueError("the payload is not sound JSON")


def _string(value: bytes) -> str | None:
    return str(json.loads(value)) if value.startswith(b'"') else None


def _json(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


# --- the document ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Node:
    """A value. `size` counts its bytes, and those of the pointers that are listed for it and for what is in it."""

    parent: "_Node | None" = None
    pointer: str = ""
    is_exact: bool = True  # the pointer leads here, not to something around it
    head: bytes = b""  # its name and the colon
    kind: object = None
    optional: bool = False
    element: bool = False  # in a collection, at any depth: it stays or goes whole once its limits are applied
    text: bytes = b""
    size: int = 0
    children: "list[_Node] | None" = None  # None for scalars and elements: what is in them is not cut further
    kept: int = 0  # of the children
    is_collection: bool = False
    changed: bool = False  # the text is not what was sent
    marked: bool = False  # it is listed, as it has lost something
    gone: bool = False  # it is listed, as it is left out of what is around it
    too_long: "ProjectionGap | None" = None
    inside: list[str] = field(default_factory=list)  # pointers to what was cut in an element

    @property
    def note(self) -> int:
        """The room that a pointer to this takes in the list, with its comma."""
        return len(_json(self.pointer)) + 1

    def listed(self) -> Iterator[str]:
        """Pointers to what was cut of this, in document order."""
        if self.gone or self.marked:
            yield self.pointer
        if not self.gone:
            yield from self.inside
            for child in self.children or ():
                yield from child.listed()

    def written(self) -> bytes:
        """Its JSON text with the children as they are now."""
        if self.children is None:
            return self.text
        return _joined(self.text, (child.head + child.written() for child in self.children if not child.gone))

    def below(self) -> "Iterator[_Node]":
        """All in it that can shrink by itself, in document order."""
        for child in self.children or ():
            if not (child.gone or child.element):
                yield child
                yield from child.below()

    def grow(self, difference: int) -> None:
        node: _Node | None = self
        while node is not None:
            node.size += difference
            node = node.parent


def _joined(container: bytes, parts: Iterable[bytes]) -> bytes:
    """The text of a container with these parts in place of what is in it."""
    return container[:1] + b",".join(parts) + container[-1:]


class _Document:
    """A payload as a tree, each value within the limits of its class."""

    def __init__(
        self, payload: bytes, schema: Mapping[str, object], max_bytes: int, *, to_shrink: bool = False
    ) -> None:
        self.payload = payload
        self.max_bytes = max_bytes
        self.to_shrink = to_shrink  # below the level of elements, too
        self.ends = _ends(payload)
        names = schema.get("x-classes")
        self.classes = {_plain(name): kind for name, kind in names.items()} if isinstance(names, Mapping) else {}
        self.classed = re.compile(b"|".join(re.escape(name.encode()) for name in self.classes) or b"(?!)")
        self.root = _Node()
        self._read(self.root, schema, 0)
        if self.root.too_long is not None:
            raise self.root.too_long
        self.lists = next(self.root.listed(), None) is not None

    def _read(self, node: _Node, schema: object, start: int) -> int:
        """Read the value at `start` into a node, within its limits, and return where it ends."""
        payload = self.payload
        if payload[start] not in b"[{":
            end = _end(_SCALAR, payload, start)
            node.text = payload[start:end]
            _limit(node)
            node.size = len(node.text) + (node.note if node.marked else 0)
            return end
        if (node.element or not self.to_shrink) and self._is_fine(node, schema, start):
            node.text = payload[start : self.ends[start]]
            node.size = len(node.text)
            return self.ends[start]
        rules = schema if isinstance(schema, Mapping) else {}
        named = payload[start] in b"{"
        described = named and ("properties" in rules or "required" in rules)
        node.is_collection = node.parent is not None and not described
        children: list[_Node] = []
        at = _end(_START, payload, start)
        while payload[at] not in b"]}":
            if node.is_collection and len(children) == MAX_ELEMENTS:
                node.marked = node.changed = True
                at = self.ends[start] - 1
                break
            name, value_at = _name(payload, at) if named else (None, at)
            below = _schema_below(rules, name)
            kind = self._class_of(node, name, below)
            if kind == "excluded" or (node.parent is None and name == "truncation"):
                node.changed = True
                end = self.ends.get(value_at) or _end(_SCALAR, payload, value_at)
            else:
                child = _child(node, rules, len(children) if name is None else name, payload[at:value_at], kind)
                end = self._read(child, below, value_at)
                _settle(child)
                children.append(child)
            at = _end(_GAP, payload, end)
        at += 1
        _close(node, children, payload[start:at])
        return at

    def _is_fine(self, container: _Node, schema: object, start: int) -> bool:
        """Whether a container certainly has nothing to cut in it: most have not, and to read them takes longer."""
        end = self.ends[start]
        if schema or container.parent is None or container.kind in MAX_CHARACTERS or end - start > MAX_TEXT_BYTES:
            return False
        text = self.payload[start:end]
        is_small = text.count(b",") < MAX_ELEMENTS
        return is_small and b"\\" not in text and not self.classed.search(_plain(text.decode()).encode())

    def _class_of(self, parent: _Node, name: str | None, below: object) -> object:
        """The class of what is in a container: the schema's, or its name's, or the container's own."""
        kind = below.get("x-class") if isinstance(below, Mapping) else None
        if kind is None and name is not None and self.classes:
            kind = self.classes.get(_plain(name))
        return parent.kind if kind is None and parent.kind in MAX_CHARACTERS else kind

    def excess(self) -> int:
        """How many bytes too long the result would be. The pointers are in the root's size, each with a comma."""
        return self.root.size + len(_TRUNCATION % b"") + bool(self.root.kept) - self.lists - self.max_bytes

    def fit(self) -> None:
        """Shrink optional content until the whole fits; the payload is without white space."""
        self._shrink()
        self.root.text = self.root.written()

    def _shrink(self) -> None:
        nodes = list(self.root.below())
        steps: list[tuple[Callable[[_Node], None], list[_Node]]] = [
            (self._drop_elements, [node for node in nodes if node.is_collection]),
            (self._shorten, [node for node in nodes if _is_text(node)]),
            (self._remove, [node for node in nodes if node.optional]),
        ]
        for shrink, concerned in steps:
            for node in reversed(concerned):
                if self.excess() <= 0:
                    return
                shrink(node)
        if (excess := self.excess()) > 0:
            raise ProjectionGap(
                "",
                f"What must be sent is {excess:,} bytes over the limit of {self.max_bytes:,}; "
                "send less, or make more of its fields optional in the schema.",
            )

    def result(self) -> Projection:
        omitted = tuple(dict.fromkeys(self.root.listed()))
        comma = b"," if self.root.kept else b""
        truncation = _TRUNCATION % b",".join(map(_json, omitted))
        return Projection(self.root.text[:-1] + comma + truncation + b"}", omitted)

    def _drop_elements(self, node: _Node) -> None:
        if node.size <= 2 + node.note:
            return
        while node.children and self.excess() > 0:
            child = node.children.pop()
            self._take_out(node, child)
            self._mark(node)

    def _shorten(self, node: _Node) -> None:
        if node.size <= 2 + node.note:
            return
        self._mark(node)
        text = str(json.loads(node.text))
        room = len(node.text) - self.excess()
        characters = bisect_right(range(len(text)), room, key=lambda end: len(_json(text[:end]))) - 1
        before, node.text = node.text, _json(text[: max(0, characters)])
        node.grow(len(node.text) - len(before))

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None
        if len(node.head) + node.size > node.note:
            self._take_out(node.parent, node)
            node.gone, node.size, self.lists = True, node.note, True
            node.parent.grow(node.size)

    def _take_out(self, parent: _Node, child: _Node) -> None:
        if child.gone:
            parent.grow(-child.size)
        else:
            parent.kept -= 1
            parent.grow(-len(child.head) - child.size - bool(parent.kept))

    def _mark(self, node: _Node) -> None:
        if not node.marked:
            node.marked = self.lists = True
            node.grow(node.note)


_TRUNCATION = b'"truncation":{"omittedFields":[%b]}'


def _child(parent: _Node, rules: Mapping[str, object], key: str | int, head: bytes, kind: object) -> _Node:
    """A node for what has this name or index in a container."""
    pointer = f"{parent.pointer}/{escaped(key) if isinstance(key, str) else key}"
    is_exact = parent.is_exact and len(pointer) <= MAX_POINTER_CHARACTERS
    return _Node(
        parent,
        pointer if is_exact else parent.pointer,
        is_exact,
        head,
        kind,
        optional=key not in _names(rules.get("required")),
        element=parent.element or parent.is_collection,
    )


def _limit(scalar: _Node) -> None:
    """Apply the limit of its class to a scalar."""
    if scalar.kind in MAX_CHARACTERS:
        limit = MAX_CHARACTERS[str(scalar.kind)]
        length = len(_string(scalar.text) or scalar.text.decode())
        if length > limit:
            scalar.too_long = ProjectionGap(
                scalar.pointer,
                f"The required {scalar.kind} at {scalar.pointer} is {length:,} characters long and the limit is "
                f"{limit}; send a shorter one.",
            )
    elif _is_text(scalar) and len(scalar.text) > MAX_TEXT_BYTES:
        content = json.loads(scalar.text).encode()
        if len(content) > MAX_TEXT_BYTES:
            scalar.text = _json(content[:MAX_TEXT_BYTES].decode(errors="ignore"))
            scalar.changed = scalar.marked = True


def _settle(child: _Node) -> None:
    """Pass on to the container what reading a child has come to."""
    parent = child.parent
    assert parent is not None
    if child.too_long is None:
        parent.kept += 1
        parent.changed = parent.changed or child.changed
    elif child.optional:
        child.gone = parent.changed = True
        child.size = child.note
    else:
        parent.too_long = parent.too_long or child.too_long


def _close(container: _Node, children: list[_Node], text: bytes) -> None:
    """A container with this text, and these children as they are within their limits, has been read."""
    if container.changed:
        text = _joined(text, (child.head + child.text for child in children if not child.gone))
    container.text = text
    notes = sum(child.size - (0 if child.gone else len(child.text)) for child in children)
    container.size = len(container.text) + (container.note if container.marked else 0) + notes
    if container.element:
        container.inside = [pointer for child in children for pointer in child.listed()]
    else:
        container.children = children


def _is_text(node: _Node) -> bool:
    return node.text[:1] == b'"' and node.kind not in MAX_CHARACTERS


def _name(payload: bytes, at: int) -> tuple[str, int]:
    """The name of the member at a place, and where its value begins."""
    value_at = _end(_HEAD, payload, at)
    name = payload[at : payload.rindex(b'"', at, value_at) + 1]
    return json.loads(name) if b"\\" in name else name[1:-1].decode(), value_at


def _plain(name: str) -> str:
    """A name as `x-classes` compares it."""
    return name.replace("_", "").replace("-", "").lower()


def _names(required: object) -> list[str]:
    return required if isinstance(required, list) else []


def _schema_below(rules: Mapping[str, object], name: str | None) -> object:
    """The schema of a member, or of an element where there is no name; None where it says nothing."""
    properties = rules.get("properties")
    if name is not None and isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return rules.get("items" if name is None else "additionalProperties")
