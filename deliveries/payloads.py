"""Validate JSON that a tenant sends, and cut it into parts, without changing a byte.

What is signed and delivered is the tenant's own text, so nothing here re-serialises. One question is asked of every
document: will every receiver read the same thing in it? Hence RFC 8259 grammar in UTF-8 without a BOM, no repeated
member name, no lone surrogate, a bounded depth; numbers of any length are left alone.

Two readers answer it. `_is_plain` is quick and may only say "certainly fine"; whatever it does not vouch for goes to
`_read`, which never recurses, is exact, and alone words the errors.
"""

import functools
import json
import re
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from webhookhub.pointers import escaped

MAX_PAYLOAD_BYTES = 262_144
"""Largest payload, in bytes: 256 KiB, what the table of payload cases (`json_payloads.json`, meta) recommends."""

MAX_DEPTH = 1000
"""Deepest nesting of a payload, `{}` being 1; from the same table. Receivers' own parsers stop between 100 and 1000."""

_PLAIN_DEPTH = 32
"""Nesting the quick reader vouches for: far above real payloads, far below the interpreter's recursion limit."""

_POINTER_CHARS = 256
"""A JSON pointer longer than this many characters helps nobody and is left out."""


class PayloadError(ValueError):
    """A document is refused. `code` is for programs, `detail` is one sentence for people, `pointer` is the JSON pointer
    (RFC 6901) to the place, empty for the whole document or where it is unknown. Positions are bytes, from 0.
    """

    def __init__(self, code: str, detail: str, pointer: str = "") -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.pointer = pointer

    @property
    def status(self) -> int:
        """The HTTP status of the refusal."""
        return 413 if self.code == "payload_too_large" else 400


def check(payload: bytes, *, max_bytes: int = MAX_PAYLOAD_BYTES, max_depth: int = MAX_DEPTH) -> None:
    """Raise `PayloadError` unless these bytes can be a payload: small enough, sound, and an object or an array."""
    check_size(payload, max_bytes)
    if not _is_plain(payload, max_depth):
        _read(payload, max_depth)
    check_kind(payload)


def slice_members(body: bytes, *, max_depth: int = MAX_DEPTH + 1) -> dict[str, bytes]:
    """Return the members of a JSON object: name to the exact bytes of the value, without the whitespace around it.

    The whole body is validated by the rules of `check`, its size apart; of a member that is to be a payload,
    `check_size` and `check_kind` remain to be asked. The default depth leaves a member room for a payload of
    `MAX_DEPTH`. Raises `PayloadError`, with `body_not_object` for JSON of another kind.
    """
    if _is_plain(body, max_depth):
        try:
            return {name: bytes(value) for name, value in _MEMBERS.decode(body).items()}
        except msgspec.MsgspecError:
            pass  # not an object, or the two libraries disagree: the exact reader decides
    members = _read(body, max_depth)
    if members is None:
        raise PayloadError(
            "body_not_object", 'The body is valid JSON but not an object; send one, as in {"type": ...}.'
        )
    return members


def slice_items(body: bytes, name: str, limit: int) -> list[bytes]:
    """Return the items of the array that is the only member, `name`, of a JSON object: the exact bytes of each.

    Each item remains to be checked, by `check` or `slice_members`; it may be an object with a payload of `MAX_DEPTH` in
    it. Raises `PayloadError` for what is no JSON, has another shape, or more items than `limit`.
    """
    begin, inner = re.match(_ONLY_MEMBER % name.encode(), body), body.rstrip(_SPACE)
    items: list[bytes] | None = None
    if begin and inner.endswith(b"}"):
        try:
            found = msgspec.structs.astuple(_items_decoder(limit + 1).decode(inner[begin.end() : -1]))
            items = [bytes(item) for item in found if item is not None]
        except (msgspec.MsgspecError, RecursionError):
            pass  # not JSON, not an array, or too deep for a reader that recurses: the exact reader decides
    if items is None:
        members = _read(body, MAX_DEPTH + 3) or {}
        if unknown := sorted(members.keys() - {name}):
            detail = f"The body has one member, {name}, and no {_shown(unknown[0])}."
            raise PayloadError("unknown_member", detail, f"/{escaped(unknown[0])}")
        if not members.get(name, b"").startswith(b"["):
            detail = f'The body must be an object with an array, as in {{"{name}": [...]}}.'
            raise PayloadError(f"{name}_missing", detail, f"/{name}")
        reader = _Reader(members[name], MAX_DEPTH + 2, max_items=limit + 1)
        reader.read()
        items = reader.items
    if len(items) > limit:
        raise PayloadError(f"{name}_too_many", f"There are more than {limit} {name} in the body.", f"/{name}")
    return items


def check_size(payload: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> None:
    """Raise `PayloadError` for what is too large."""
    if len(payload) > max_bytes:
        raise PayloadError(
            "payload_too_large",
            f"The payload is {len(payload):,} bytes long and the limit is {max_bytes:,}; "
            "send less, or send a link to where the rest can be fetched.",
        )


def check_kind(payload: bytes) -> None:
    """Raise `PayloadError` for a value that is neither an object nor an array."""
    if not _CONTAINER.match(payload):
        raise PayloadError(
            "payload_not_object_or_array",
            'The payload is valid JSON but neither an object nor an array; wrap the value, as in {"value": ...}.',
        )


# --- the quick reader -----------------------------------------------------------------------------------------------


def _refuse_repeated_names(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("repeated name")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


# parse_int=str: int() would refuse more than 4,300 digits, and float() would read 1e999 as infinity.
_PLAIN = json.JSONDecoder(
    object_pairs_hook=_refuse_repeated_names, parse_int=str, parse_float=str, parse_constant=_refuse_constant
)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@functools.cache
def _items_decoder(limit: int) -> msgspec.json.Decoder[msgspec.Struct]:
    """Reads an array as a struct of its first `limit` items, passing over the rest: a list would hold millions."""
    fields = [(f"item{number}", msgspec.Raw, msgspec.field(default=None)) for number in range(limit)]
    return msgspec.json.Decoder(msgspec.defstruct("Items", fields, array_like=True))


_SPACE = b" \t\r\n"
_ONLY_MEMBER = rb'[ \t\r\n]*{[ \t\r\n]*"%b"[ \t\r\n]*:'  # the way to its value

_CONTAINER = re.compile(rb"[ \t\r\n]*[\[{]")
_SURROGATE_PAIR = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE_BEGINS = re.compile(rb"\\u[dD]")
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def _is_plain(payload: bytes, max_depth: int) -> bool:
    """Whether the document is certainly fine. False means only that `_read` must say."""
    try:
        text = payload.decode().strip(" \t\r\n")
        _, end = _PLAIN.raw_decode(text)
    except (ValueError, RecursionError):
        return False
    if end != len(text):
        return False
    # From here on the text is grammatical, which the byte counting below relies on.
    return not _has_lone_surrogate(payload) and _is_shallow(payload, min(max_depth, _PLAIN_DEPTH))


def _has_lone_surrogate(text: bytes) -> bool:
    r"""Whether grammatical JSON text has a `\uD8xx` escape without its other half. Escaped backslashes are blanked
    first, as they may stand before an innocent "u"; blanked, not removed, or two halves could come to touch.
    """
    if not _SURROGATE_BEGINS.search(text):
        return False
    return _SURROGATE.search(_SURROGATE_PAIR.sub(b"", text.replace(rb"\\", b"  "))) is not None


def _is_shallow(text: bytes, limit: int) -> bool:
    """Whether grammatical JSON text nests at most `limit` levels: keep only the brackets outside strings, then take
    away the innermost pairs, one level a turn.
    """
    if text.count(b"[") + text.count(b"{") <= limit:
        return True
    outside = b"".join(text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    brackets = outside.translate(_TO_SQUARE, _NOT_BRACKETS)
    for _ in range(limit):
        brackets = brackets.replace(b"[]", b"")
    return not brackets


# --- the exact reader -----------------------------------------------------------------------------------------------

_SCALAR = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_STRING_BUT_ITS_END = re.compile(rb'"(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_BOM = b"\xef\xbb\xbf"
_OBJECT, _END_OF_OBJECT, _ARRAY, _END_OF_ARRAY, _QUOTE, _COMMA, _COLON, _BACKSLASH = b'{}[]",:\\'


def _read(payload: bytes, max_depth: int) -> dict[str, bytes] | None:
    """Read one document, raise `PayloadError` at its first fault; return the slices of an object, None for the rest."""
    if payload.startswith(_BOM):
        raise PayloadError("bom_not_allowed", "The JSON begins with a byte order mark; send UTF-8 without one.")
    try:
        payload.decode()
    except UnicodeDecodeError as error:
        raise PayloadError(
            "invalid_utf8", f"The JSON is not UTF-8 at byte {error.start} ({error.reason}); encode it as UTF-8."
        ) from None
    return _Reader(payload, max_depth).read()


@dataclass(slots=True)
class _Container:
    """An object or array whose end has not been read yet, and the place in it that is being read."""

    names: set[str] | None  # an object's names seen so far; None for an array
    name: str | None = None
    item: int = 0


class _Reader:
    """One walk over a document. Open containers are kept in a list: depth costs memory, never recursion."""

    def __init__(self, text: bytes, max_depth: int, max_items: int = 0) -> None:
        self.text = text + b"\0"  # a byte that is valid nowhere, so that no step has to ask whether it is at the end
        self.max_depth = max_depth
        self.open: list[_Container] = []
        self.max_items = max_items
        self.items: list[bytes] = []  # the first ones of a document that is an array

    def read(self) -> dict[str, bytes] | None:
        text, containers = self.text, self.open
        at = start = self._after_space(0)
        if at == len(text) - 1:
            raise PayloadError("empty_body", "The JSON is empty; send an object, at the least {}.")
        members: dict[str, bytes] | None = {} if text[at] == _OBJECT else None
        while True:
            if len(containers) == 1:
                start = at
            at, ended = self._begin_value(at)
            while ended:
                if not containers:
                    self._end_document(at)
                    return members
                container = containers[-1]
                if len(containers) == 1:
                    if members is None and len(self.items) < self.max_items:
                        self.items.append(text[start:at])
                    elif members is not None and container.name is not None:
                        members[container.name] = text[start:at]
                at, ended = self._end_value(container, at)

    def _begin_value(self, at: int) -> tuple[int, bool]:
        """Read a scalar or an empty container, or open a container and go to its first value. Returns the position
        reached, and whether a value ends there or one begins.
        """
        text = self.text
        first = text[at]
        if first == _QUOTE:
            return self._end_of_string(at), True
        if first != _OBJECT and first != _ARRAY:
            return self._end_of_scalar(at), True
        if len(self.open) == self.max_depth:
            self._fail("nesting_too_deep", f"nests deeper than {self.max_depth} levels at byte {at}; flatten it")
        at = self._after_space(at + 1)
        if first == _ARRAY:
            if text[at] == _END_OF_ARRAY:
                return at + 1, True
            self.open.append(_Container(None))
            return at, False
        if text[at] == _END_OF_OBJECT:
            return at + 1, True
        names: set[str] = set()
        container = _Container(names)
        self.open.append(container)
        return self._value_of_name(container, names, at), False

    def _end_value(self, container: _Container, at: int) -> tuple[int, bool]:
        """Read what follows a value in its container: a comma and the way to the next value, or the container's end."""
        at = self._after_space(at)
        mark, names = self.text[at], container.names
        if mark == _COMMA:
            at = self._after_space(at + 1)
            if names is not None:
                return self._value_of_name(container, names, at), False
            container.item += 1
            return at, False
        if mark == (_END_OF_ARRAY if names is None else _END_OF_OBJECT):
            self.open.pop()
            return at + 1, True
        wanted = "a comma or ']'" if names is None else "a comma or '}'"
        self._fail("invalid_json", f"has {self._found(at)} where {wanted} must follow a value")

    def _end_document(self, at: int) -> None:
        at = self._after_space(at)
        if at != len(self.text) - 1:
            self._fail("invalid_json", f"goes on after its end, with {self._found(at)}; send one document at a time")

    def _value_of_name(self, container: _Container, names: set[str], at: int) -> int:
        """Read a member's name and the colon, and go to its value."""
        text = self.text
        container.name = None
        if text[at] != _QUOTE:
            self._fail("invalid_json", f"has {self._found(at)} where a member's name in double quotes must begin")
        end = self._end_of_string(at)
        name = text[at + 1 : end - 1].decode()
        if "\\" in name:  # compared unescaped: "a" and "\u0061" are one name to every receiver
            name = json.loads(f'"{name}"')
        container.name = name
        if name in names:
            self._fail(
                "duplicate_key",
                f"repeats the name {_shown(name)} in one object, up to byte {end}; give each member its own name",
            )
        names.add(name)
        at = self._after_space(end)
        if text[at] != _COLON:
            self._fail("invalid_json", f"has {self._found(at)} where a colon must follow the name {_shown(name)}")
        return self._after_space(at + 1)

    def _end_of_scalar(self, at: int) -> int:
        if found := _SCALAR.match(self.text, at):
            return found.end()
        if self.text.startswith(_BOM, at):
            self._fail("bom_not_allowed", f"has a byte order mark at byte {at}; send UTF-8 without one")
        self._fail(
            "invalid_json",
            f"has {self._found(at)} where a value must begin: an object, an array, a string, a number, true, false or "
            "null (NaN, Infinity, None and undefined do not exist in JSON)",
        )

    def _end_of_string(self, at: int) -> int:
        text = self.text
        found = _STRING_BUT_ITS_END.match(text, at)
        end = found.end() if found else at
        if text[end] != _QUOTE:
            if end == len(text) - 1:
                self._fail("invalid_json", f"ends inside the string that begins at byte {at}; close its double quote")
            fault = "an escape JSON does not know" if text[end] == _BACKSLASH else "a bare control character"
            self._fail("invalid_json", f"has {fault} inside a string, at byte {end}; escape it as \\uXXXX")
        end += 1
        if _has_lone_surrogate(text[at:end]):
            self._fail(
                "lone_surrogate",
                f"has half of a surrogate pair in the string that begins at byte {at}; write both halves or neither",
            )
        return end

    def _after_space(self, at: int) -> int:
        text = self.text
        while text[at] in b" \t\r\n":
            at += 1
        return at

    def _found(self, at: int) -> str:
        """What stands at a byte, for a message."""
        if at == len(self.text) - 1:
            return f"its end (byte {at})"
        return f"{self.text[at : at + 4].decode(errors='ignore')[0]!r} at byte {at}"

    def _fail(self, code: str, fault: str) -> NoReturn:
        raise PayloadError(code, f"The JSON {fault}.", self._pointer())

    def _pointer(self) -> str:
        pointer = ""
        for container in self.open:
            if container.names is None:
                pointer += f"/{container.item}"
            elif container.name is not None:
                pointer += f"/{escaped(container.name)}"
            if len(pointer) > _POINTER_CHARS:
                return ""
        return pointer


def _shown(name: str) -> str:
    return json.dumps(name if len(name) <= 40 else name[:39] + "…", ensure_ascii=False)
