"""Delivery contracts: what a sender promises its receivers, each one pure value. No Django, no clock, no I/O.

`decide` turns a contract and the result of one attempt into a verdict; everything else only reads values.
"""

import calendar
import hashlib
import re
from dataclasses import dataclass
from typing import Literal

Action = Literal["delivered", "retry", "dead", "disable"]

SATURATION = 2**31  # seconds; RFC 9111 section 1.2.2: larger delays are this one
DAY = 86_400


@dataclass(frozen=True, slots=True)
class Contract:
    """The promises of one contract. Times are in seconds, sizes in bytes.

    `waits[n - 1]` is the wait between the end of failed attempt n and attempt n + 1, spread by ±`jitter` (a share of
    it). `retry_after_on` are the statuses whose `Retry-After` may lengthen a wait, up to `retry_after_cap`.
    """

    name: str
    title: str
    waits: tuple[int, ...]
    jitter: float
    retry_after_on: frozenset[int]
    retry_after_cap: int
    disable_on: frozenset[int]
    deadline: float
    read_bytes: int
    keep_bytes: int
    signature: str

    @property
    def max_attempts(self) -> int:
        """How many attempts a delivery gets before it is dead."""
        return len(self.waits) + 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a delivery. `wait` (seconds from the end of the attempt) is set when `action` is `retry`.

    `disable` is `dead` for this delivery, and no more for its endpoint.
    """

    action: Action
    wait: float = 0.0


# Standard Webhooks, https://github.com/standard-webhooks/standard-webhooks: its schedule (each wait counts from the
# attempt before), its signature, 2xx only as success, 410 as "stop sending".
STANDARD = Contract(
    name="standard",
    title="Standard Webhooks",
    waits=(5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, DAY),
    jitter=0.1,
    retry_after_on=frozenset({429, 503}),
    retry_after_cap=DAY,
    disable_on=frozenset({410}),
    deadline=15.0,
    read_bytes=65_536,
    keep_bytes=4_096,
    signature="standard-webhooks",
)

CONTRACTS: dict[str, Contract] = {contract.name: contract for contract in (STANDARD,)}


def decide(
    contract: Contract, *, delivery: str, attempt: int, status: int | None, retry_after: str | None, now: float
) -> Verdict:
    """What the contract says after the `attempt`-th counted attempt (from 1) of a delivery.

    `status` is the final HTTP status, or None when there was no usable answer; `retry_after` the header's value as it
    came; `now` the end of the attempt in Unix seconds. Draws for the same delivery and attempt are the same each time.
    """
    if status is not None and 200 <= status <= 299:
        return Verdict("delivered")
    if status in contract.disable_on:
        return Verdict("disable")
    if attempt > len(contract.waits):
        return Verdict("dead")
    base = contract.waits[attempt - 1]
    share = draw(delivery, attempt)
    wait = base * (1 - contract.jitter + 2 * contract.jitter * share)
    if status in contract.retry_after_on:
        asked = parse_retry_after(retry_after, now)
        if asked is not None:
            # Never sooner than asked; the spread comes on top, so that receivers are not met by all at one second.
            asked = min(asked, contract.retry_after_cap)
            wait = max(wait, asked * (1 + contract.jitter * share))
    return Verdict("retry", wait)


def draw(delivery: str, number: int) -> float:
    """A number in [0, 1) that is always the same for a delivery and a number: SHA-256 of `delivery:number`."""
    return int.from_bytes(hashlib.sha256(f"{delivery}:{number}".encode()).digest()[:8], "big") / 2**64


_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_CLOCK = r"(?P<hour>[01][0-9]|2[0-3]):(?P<minute>[0-5][0-9]):(?P<second>[0-5][0-9]|60)"
_SHORT_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG_DAY = "(?:Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)"
# RFC 9110 section 5.6.7: IMF-fixdate, and the two obsolete forms that a recipient must accept.
_HTTP_DATES = tuple(
    re.compile(form)
    for form in (
        rf"{_SHORT_DAY}, (?P<day>[0-9]{{2}}) (?P<month>{_MONTHS}) (?P<year>[0-9]{{4}}) {_CLOCK} GMT",
        rf"{_LONG_DAY}, (?P<day>[0-9]{{2}})-(?P<month>{_MONTHS})-(?P<year>[0-9]{{2}}) {_CLOCK} GMT",
        rf"{_SHORT_DAY} (?P<month>{_MONTHS}) (?P<day>[0-9]{{2}}| [0-9]) {_CLOCK} (?P<year>[0-9]{{4}})",
    )
)


def parse_retry_after(value: str | None, now: float) -> int | None:
    """The seconds from `now` (Unix time) that a `Retry-After` asks for: 0 for a past date, None for no valid value.

    RFC 9110 section 10.2.3: one or more ASCII digits, or an HTTP-date. Clamping is the contract's business.
    """
    if value is None:
        return None
    value = value.strip(" \t")  # RFC 9110's optional whitespace, and no other
    if re.fullmatch("[0-9]+", value):
        digits = value.lstrip("0")
        return SATURATION if len(digits) > 10 else min(int(digits or "0"), SATURATION)
    for form in _HTTP_DATES:
        if match := form.fullmatch(value):
            moment = _unix_time(match, now)
            return None if moment is None else min(max(0, moment - int(now)), SATURATION)
    return None


def _unix_time(date: re.Match[str], now: float) -> int | None:
    year, day = int(date["year"]), int(date["day"])
    month = _MONTHS.split("|").index(date["month"]) + 1
    if len(date["year"]) == 2:
        # RFC 9110: a two-digit year that seems more than 50 years ahead is the most recent past year of these digits.
        this_year = 1970 + int(now // 31_556_952)
        year += this_year // 100 * 100
        if year - this_year > 50:
            year -= 100
    if not 1 <= day <= calendar.monthrange(max(year, 1), month)[1]:
        return None
    return calendar.timegm((year, month, day, int(date["hour"]), int(date["minute"]), int(date["second"])))
