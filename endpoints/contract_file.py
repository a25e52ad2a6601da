"""Contracts of the operator's own, from a TOML file: a base, and what differs from it. Pure.

[patient]
base = "standard"
title = "Patient"
waits = [10, 60, 600, 3600]     # seconds before attempts 2, 3, ...
jitter = 20                     # percent before and after
terminal = [400, "410-499"]     # statuses that end a delivery
"""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from endpoints.contracts import PLACEHOLDERS, SATURATION, Contract, RetryAfter, Step

NAME = re.compile(r"[a-z][a-z0-9_-]{0,49}")
MAX_ATTEMPTS = 100
MAX_BODY_BYTES = 1_048_576
SIGNATURES = ("standard-webhooks", "stripe-like", "github-like", "shopify-like", "slack-like")  # of signing.SCHEMES
WHEN_INACTIVE = ("hold", "dead", "skip")
MAX_HEADERS = 20
# A header line: RFC 9110's token, and visible ASCII with single spaces between.
_HEADER = re.compile(r"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}): (?P<value>[\x21-\x7e]+( [\x21-\x7e]+)*)")
_PLACEHOLDER = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
# What the request, the signature or the connection sets.
_RESERVED = re.compile(
    r"host|content-.*|transfer-encoding|connection|keep-alive|upgrade|te|trailer|expect|date|user-agent|accept.*|"
    r"authorization|cookie|proxy-.*|webhook-(id|timestamp|signature)|.*-signature|x-hub-signature-256|"
    r"x-shopify-hmac-sha256|x-slack-request-timestamp|elicitra-timestamp|kingminos-event-id",
    re.IGNORECASE,
)


class ContractFileError(ValueError):
    """The file cannot be used; the message names the line, the value and the rule."""


def read_contracts(text: str, known: Mapping[str, Contract]) -> dict[str, Contract]:
    """The contracts that a file defines, by name. A base is a contract of `known`, or one above in the file.

    Raises ContractFileError.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ContractFileError(f"not TOML: {error}{_last_begun(text, str(error))}") from error
    found: dict[str, Contract] = {}
    for name, table in tables.items():
        try:
            found[name] = _read(name, table, {**known, **found})
        except _Wrong as wrong:
            raise ContractFileError(f"line {_line_of(text, name, wrong.key)}: {wrong}") from None
    return found


class _Wrong(Exception):
    def __init__(self, key: str, rule: str) -> None:
        super().__init__(rule)
        self.key = key


def _read(name: str, table: Any, known: Mapping[str, Contract]) -> Contract:
    if not isinstance(table, dict):
        raise _Wrong(name, f"{name} stands outside of any contract; begin one with [name]")
    if not NAME.fullmatch(name):
        raise _Wrong("", f"the name {name!r} must be lower-case letters, digits, _ and -, beginning with a letter")
    if name in known:
        raise _Wrong("", f"there is a contract {name!r} already; choose another name")
    base = known.get(str(table.get("base", "standard")))
    if base is None:
        raise _Wrong("base", f"base is {table['base']!r}; it must be one of {', '.join(sorted(known))}")
    if unknown := sorted(table.keys() - _FIELDS.keys() - {"base", "title", "waits", "offsets", "jitter"}):
        raise _Wrong(unknown[0], f"{unknown[0]!r} is no part of a contract; there are {', '.join(sorted(_KEYS))}")
    changes: dict[str, Any] = {"name": name, "title": _text(table.get("title", name), "title")}
    changes |= _schedule(table, base)
    changes |= {key: read(table[key], key) for key, read in _FIELDS.items() if key in table}
    return dataclasses.replace(base, **changes)


def _schedule(table: dict[str, Any], base: Contract) -> dict[str, Any]:
    key = next((key for key in ("waits", "offsets") if key in table), None)
    if key is None:
        if "jitter" in table:
            raise _Wrong("jitter", "jitter goes with waits or offsets; give the schedule too")
        return {}
    if key == "waits" and "offsets" in table:
        raise _Wrong("offsets", "a schedule is waits (from the attempt before) or offsets (from the first), not both")
    seconds, jitter = table[key], _number(table.get("jitter", 10), "jitter", most=50)
    if not isinstance(seconds, list) or not 0 < len(seconds) < MAX_ATTEMPTS:
        raise _Wrong(key, f"{key} must be a list of 1 to {MAX_ATTEMPTS - 1} numbers of seconds")
    times = [_number(one, key, least=1, most=SATURATION) for one in seconds]
    if key == "offsets" and sorted(set(times)) != times:
        raise _Wrong(key, "offsets count from the first attempt, so that each must be later than the one before")
    steps = tuple(Step.around(one, early=jitter, late=jitter) for one in times)
    return {
        "steps": steps,
        "from_first": key == "offsets",
        "draw_offset": int(key == "offsets"),
        "overdue": (base.overdue or 60_000) if key == "offsets" else 0,
    }


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 100:
        raise _Wrong(key, f"{key} must be a text of 1 to 100 characters")
    return value


def _number(value: Any, key: str, *, least: int = 0, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _Wrong(key, f"{key} has {value!r}; it must be a whole number from {least:,} to {most:,}")
    return value


def _statuses(value: Any, key: str) -> frozenset[int]:
    found: set[int] = set()
    for item in value if isinstance(value, list) else [value]:
        first, dash, last = str(item).partition("-")
        if not (
            bool(dash) == bool(last)
            and first.isdecimal()
            and (last or first).isdecimal()
            and 100 <= int(first) <= int(last or first) <= 599
        ):
            raise _Wrong(key, f"{key} has {item!r}; it must be a status from 100 to 599, or a range like '410-499'")
        found.update(range(int(first), int(last or first) + 1))
    if successes := sorted(found & set(range(200, 300))):
        raise _Wrong(key, f"{key} has {successes[0]}, and any 2xx is a success")
    return frozenset(found)


def _retry_after(value: Any, key: str) -> RetryAfter | None:
    if value is False:
        return None
    parts = {"statuses", "least", "most", "replaces", "late"}
    if not isinstance(value, dict) or value.keys() - parts:
        raise _Wrong(key, f"{key} must be false (ignored) or a table of {', '.join(sorted(parts))}")
    least = _number(value.get("least", 0), f"{key}.least", most=SATURATION)
    return RetryAfter(
        statuses=_statuses(value["statuses"], f"{key}.statuses") if "statuses" in value else None,
        least=least,
        most=_number(value.get("most", max(least, 86_400)), f"{key}.most", least=least, most=SATURATION),
        replaces=_flag(value.get("replaces", False), f"{key}.replaces"),
        late=_number(value.get("late", 0), f"{key}.late", most=100),
    )


def _one_of(choices: tuple[str, ...]) -> Callable[[Any, str], str]:
    def read(value: Any, key: str) -> str:
        if value not in choices:
            raise _Wrong(key, f"{key} has {value!r}; it must be one of {', '.join(choices)}")
        return str(value)

    return read


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(key, f"{key} has {value!r}; it must be true or false")
    return value


def _headers(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_HEADERS:
        raise _Wrong(key, f"{key} must be a list of at most {MAX_HEADERS} lines like 'X-Attempt: {{attempt}}'")
    names = set()
    for line in value:
        parts = _HEADER.fullmatch(line) if isinstance(line, str) else None
        if parts is None:
            raise _Wrong(key, f"{key} has {line!r}; it must be a line like 'X-Attempt: {{attempt}}'")
        if _RESERVED.fullmatch(parts["name"]):
            raise _Wrong(key, f"{key} has {parts['name']}, which is not for a contract to set; choose another name")
        if parts["name"].lower() in names:
            raise _Wrong(key, f"{key} has {parts['name']} twice; give each header once")
        names.add(parts["name"].lower())
        if re.search("[{}]", _PLACEHOLDER.sub("", parts["value"])):
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise _Wrong(key, f"{key} has {line!r}; a line may hold {known}, and braces only for them")
    return tuple(value)


_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "retry_after": _retry_after,
    "terminal": _statuses,
    "disable_on": _statuses,
    "deadline": lambda value, key: float(_number(value, key, least=1, most=15)),  # a lease outlives it
    "patience": lambda value, key: _number(value, key, most=3_600),
    "read_bytes": lambda value, key: _number(value, key, most=MAX_BODY_BYTES),
    "signature": _one_of(SIGNATURES),
    "keep_bytes": lambda value, key: _number(value, key, most=MAX_BODY_BYTES),
    "headers": _headers,
    "disable_after": lambda value, key: _number(value, key, least=1, most=1_000_000) if value is not False else None,
    "replay_window": lambda value, key: _number(value, key, least=1, most=SATURATION) if value is not False else None,
    "when_inactive": _one_of(WHEN_INACTIVE),
    "https_443": _flag,
    "fixed_url": _flag,
    "challenge": _flag,
}
_KEYS = {"base", "title", "waits", "offsets", "jitter", *_FIELDS}


def _last_begun(text: str, message: str) -> str:
    """Where the value stands that the end of the file came into: the reader only knows that it did."""
    if "at end of document" not in message:
        return ""
    return f"; the last value begins in line {max((number for number, _ in _places(text)), default=1)}"


def _line_of(text: str, name: str, key: str) -> int:
    """The line of a key (`retry_after.most`) in a table, or of what of it comes first; for people to find."""
    wanted, found, most = [name, *filter(None, key.split("."))], 1, 0
    for number, place in _places(text):
        common = next((at for at, pair in enumerate(zip(wanted, place, strict=False)) if pair[0] != pair[1]), None)
        common = min(len(wanted), len(place)) if common is None else common
        if common > most:
            found, most = number, common
    return found


def _places(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines that begin a table or a value, and its path."""
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if heading := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = _path(heading[1])
            yield number, table
        elif value := re.match(r"\s*([\w\".-]+)\s*=", line):
            yield number, table + _path(value[1])


def _path(dotted: str) -> list[str]:
    return [part.strip().strip('"') for part in dotted.split(".")]
