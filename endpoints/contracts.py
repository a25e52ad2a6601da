"""Delivery contracts: what a sender promises its receivers, each one pure value. No Django, no clock, no I/O.

`decide` turns a contract, the history of a delivery and the result of one attempt into a verdict; everything else only
reads values. Moments and waits are whole milliseconds, so that a schedule is the same everywhere.
"""

import calendar
import functools
import hashlib
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import msgspec

Action = Literal["delivered", "retry", "exhausted", "terminal", "disable", "requeue"]
# What becomes of deliveries to an endpoint that is not active: kept for it and sent when it is again; dead, unsent; or
# not made at all (then what was under way is kept until somebody replays it).
WhenInactive = Literal["hold", "dead", "skip"]

SATURATION = 2**31  # seconds; RFC 9111 section 1.2.2: larger delays are this one
MINUTE, HOUR, DAY = 60, 3_600, 86_400  # seconds

# What a contract's header lines may hold: the attempt's number, when the event was accepted (RFC 3339), its place among
# all events (a later one has the higher number), its UUIDv4 key, and the ids of event and delivery.
PLACEHOLDERS = ("attempt", "time", "sequence", "key", "event", "delivery")


@dataclass(frozen=True, slots=True)
class Step:
    """When an attempt comes: `least` milliseconds and one of `draws` equally likely multiples of `grain` on top.

    `nominal` is the time that the contract's text names.
    """

    nominal: int
    least: int
    draws: int = 1
    grain: int = 1

    @classmethod
    def around(cls, seconds: int, *, early: int = 0, late: int = 0) -> Self:
        """A time of so many seconds, spread by percentages of it before and after."""
        milliseconds = seconds * 1000
        spread = milliseconds * (early + late) // 100
        return cls(milliseconds, milliseconds * (100 - early) // 100, max(spread, 1))

    @property
    def most(self) -> int:
        """The latest time that can be drawn."""
        return self.least + (self.draws - 1) * self.grain

    def at(self, number: int) -> int:
        """The time for a drawn number in [0, 2**64)."""
        return self.least + (self.draws * number >> 64) * self.grain


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """What a `Retry-After` does: on which statuses (None: on all but 2xx), clamped to how many seconds.

    It takes the place of the scheduled time, or the later of the two counts; `late` percent are added by the draw, so
    that not all come back at one second.
    """

    statuses: frozenset[int] | None
    least: int
    most: int
    replaces: bool = False
    late: int = 0


@dataclass(frozen=True, slots=True)
class Contract:
    """The promises of one contract.

    `steps[n - 2]` says when attempt n comes: counted from the end of the attempt before, or with `from_first` from the
    start of the first one (then one that has passed comes `overdue` milliseconds after the end of the attempt).
    Numbers are drawn from `delivery:k`, k = attempts made + `draw_offset`. `terminal` statuses and `terminal_errors`
    end a delivery at once; those of `disable_on` its endpoint too, and so do `disable_after` dead deliveries in a row.
    While its endpoint only fails, an attempt that is due may wait for `patience` seconds. Deadline and windows are in
    seconds, sizes in bytes; the replay window counts from the end of a delivery, or from
    the event with `replay_from_event`.

    `signature` names the scheme (`endpoints.signing.SCHEMES`) whose headers go with every request, `headers` the lines
    beside them (placeholders: `PLACEHOLDERS`). Event ids begin with `event_prefix`. With `envelope`, the body is a
    CloudEvent around the payload, of `max_body_bytes` at most. An endpoint's URL must be `https` on port 443 with
    `https_443`, and never changes with `fixed_url`; with `challenge` it gets nothing before a challenge that was sent
    there has been pasted back. `catalogue` names the event types (`endpoints.catalogues`) that come with the contract
    and are all it can ask for. `credits` is what the first success of a conditional event costs. A `control` message
    (a challenge, a test) goes to endpoints that are not active too, and counts for nothing.
    """

    name: str
    title: str
    steps: tuple[Step, ...]
    from_first: bool = False
    draw_offset: int = 0
    overdue: int = 0
    retry_after: RetryAfter | None = None
    terminal: frozenset[int] = frozenset()
    terminal_errors: frozenset[str] = frozenset()
    disable_on: frozenset[int] = frozenset()
    disable_after: int | None = None
    deadline: float = 15.0
    patience: int = 0
    read_bytes: int = 65_536
    keep_bytes: int = 4_096
    replay_window: int | None = None
    replay_from_event: bool = False
    signature: str = "standard-webhooks"
    headers: tuple[str, ...] = (
        "webhook-attempt: {attempt}",
        "webhook-event-time: {time}",
        "webhook-sequence: {sequence}",
    )
    event_prefix: str = "evt"
    envelope: bool = False
    max_body_bytes: int | None = None
    https_443: bool = False
    fixed_url: bool = False
    challenge: bool = False
    catalogue: str = ""
    when_inactive: WhenInactive = "hold"
    credits: int = 0
    control: bool = False
    states: tuple[tuple[Action, str], ...] = (("exhausted", "dead"), ("terminal", "dead"), ("disable", "dead"))
    coarse_errors: bool = False

    @property
    def max_attempts(self) -> int:
        """How many attempts a delivery gets."""
        return len(self.steps) + 1

    def without_spread(self) -> Self:
        """The same contract with every attempt at the time that its text names."""
        return replace(self, steps=tuple(Step(step.nominal, step.nominal) for step in self.steps))

    def state_after(self, action: Action) -> str:
        """The contract's own word for a final state."""
        return dict(self.states).get(action, "succeeded" if action == "delivered" else "pending")

    def may_replay(self, age: float) -> bool:
        """Whether what began its replay window `age` seconds ago may be replayed."""
        return self.replay_window is None or age <= self.replay_window

    def can_follow(self, other: Self) -> bool:
        """Whether an endpoint can change from the other contract to this one: nothing its receiver set up differs."""
        return all(getattr(self, name) == getattr(other, name) for name in ("signature", "challenge", "catalogue"))

    def for_control(self, kind: str, **changes: Any) -> Self:
        """The contract of a control message: one try, which has no effect on the endpoint whatever comes of it."""
        return replace(
            self,
            name=f"{self.name}/{kind}",
            steps=(),
            disable_on=frozenset(),
            disable_after=None,
            credits=0,
            control=True,
            **changes,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a delivery. `wait` (milliseconds from the end of the attempt) is set when `action` is `retry`.

    `exhausted`, `terminal` and `disable` end it; `disable` also its endpoint. `requeue` is a fault of ours, which is no
    attempt.
    """

    action: Action
    wait: int = 0


def decide(
    contract: Contract,
    *,
    delivery: str,
    attempt: int,
    first_started: int,
    ended: int,
    status: int | None,
    error: str = "",
    retry_after: str | None = None,
) -> Verdict:
    """What the contract says after a delivery's attempt number `attempt` (from 1).

    `status` is the final HTTP status, or None with the word for it in `error`; `retry_after` the header's value as it
    came; `first_started` and `ended` Unix milliseconds. The same delivery and attempt always get the same answer.
    """
    if status is not None and 200 <= status <= 299:
        return Verdict("delivered")
    if error == "local_resource_exhausted":
        return Verdict("requeue")
    if status in contract.disable_on:
        return Verdict("disable")
    if status in contract.terminal or error in contract.terminal_errors:
        return Verdict("terminal")
    if attempt >= contract.max_attempts:
        return Verdict("exhausted")
    number = draw(delivery, attempt + contract.draw_offset)
    wait = contract.steps[attempt - 1].at(number)
    if contract.from_first:
        wait = first_started + wait - ended
        wait = wait if wait > 0 else contract.overdue
    rule = contract.retry_after
    if rule and status is not None and (rule.statuses is None or status in rule.statuses):
        asked = parse_retry_after(retry_after, ended / 1000)
        if asked is not None:
            asked = min(max(asked, rule.least), rule.most) * 1000
            asked += asked * rule.late * number // 100 >> 64
            wait = asked if rule.replaces else max(wait, asked)
    return Verdict("retry", wait)


def definition(contract: Contract) -> str:
    """The whole contract as JSON, always the same text for the same contract."""
    return msgspec.json.encode(contract, order="deterministic").decode()


def from_definition(text: str) -> Contract:
    """The contract that `definition` wrote. Raises msgspec.ValidationError for what this release cannot honour."""
    return msgspec.json.decode(text, type=Contract)


@functools.cache
def key_of(contract: Contract) -> str:
    """What tells this contract from one of the same name with other content: `standard@5f0c...`."""
    return f"{contract.name}@{hashlib.sha256(definition(contract).encode()).hexdigest()[:12]}"


def draw(delivery: str, number: int) -> int:
    """A number in [0, 2**64) that is always the same: the first 8 bytes of SHA-256 of `delivery:number`."""
    return int.from_bytes(hashlib.sha256(f"{delivery}:{number}".encode()).digest()[:8], "big")


# The few words of contracts that tell a receiver's owner no more than what it can act on.
_COARSE = {
    "dns_nxdomain": "dns_nxdomain",
    "dns_no_address": "dns_nxdomain",
    "dns_timeout": "timeout",
    "connect_timeout": "timeout",
    "read_timeout": "timeout",
    "total_timeout": "timeout",
    "webhook_secret_unavailable": "webhook_secret_unavailable",
    "endpoint_inactive": "endpoint_inactive",
    "endpoint_deleted": "endpoint_inactive",
    "webhooks_not_enabled": "webhooks_not_enabled",
}


def last_error(contract: Contract, *, status: int | None, error: str, reason: str = "") -> str:
    """The contract's word for what went wrong: `http_<status>`, or an error's; `reason` is the address rule's."""
    if status is not None:
        return f"http_{status}"
    if error == "blocked_address" and contract.coarse_errors:
        return f"blocked_endpoint_host:{reason}"
    return _COARSE.get(error, "transport_error") if contract.coarse_errors else error


def dead_in_a_row(disable_after: int, before: int, outcome: Action | Literal["unsent"]) -> tuple[int, bool]:
    """An endpoint's run of dead deliveries after one more outcome, and whether it is to be disabled for it.

    `unsent` is a delivery that went dead because its endpoint or its tenant was switched off; it does not count.
    """
    if outcome == "delivered":
        return 0, False
    if outcome not in ("exhausted", "terminal", "disable"):
        return before, False
    return before + 1, before + 1 >= disable_after


# Standard Webhooks, https://github.com/standard-webhooks/standard-webhooks: its schedule (each wait counts from the
# attempt before), its signature, 2xx only as success, 410 as "stop sending".
STANDARD = Contract(
    name="standard",
    title="Standard Webhooks",
    steps=tuple(
        Step.around(seconds, early=10, late=10)
        for seconds in (5, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, DAY)
    ),
    retry_after=RetryAfter(frozenset({429, 503}), least=0, most=DAY, late=10),
    disable_on=frozenset({410}),
    patience=60,
)

_SWITCHED_OFF = frozenset({"endpoint_inactive", "endpoint_deleted", "webhooks_not_enabled"})

# The sender/receiver coordination brief. Of the statuses that its text leaves out, 1xx and the 5xx that pass are tried
# again, and what needs a person is terminal.
BRIEF = Contract(
    name="brief",
    title="Coordination brief",
    steps=(
        *(Step.around(seconds, early=20, late=20) for seconds in (30, 60, 120, 240)),
        Step.around(480, early=20),  # capped at 480 s: only downwards
    ),
    retry_after=RetryAfter(frozenset({429}), least=1, most=DAY, replaces=True),
    headers=("idempotency-key: {key}", *STANDARD.headers),
    terminal=frozenset({*range(300, 500), 501, 505, 506, 508, 510, 511} - {408, 425, 429}),
    terminal_errors=_SWITCHED_OFF | {"blocked_address"},
    replay_window=72 * HOUR,
    states=(("exhausted", "exhausted"), ("terminal", "terminal")),
)

BETTERSTOOD = Contract(
    name="betterstood",
    title="Betterstood",
    steps=tuple(
        Step.around(seconds, early=10, late=10)
        for seconds in (MINUTE, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 6 * HOUR, 24 * HOUR, 72 * HOUR)
    ),
    from_first=True,
    draw_offset=1,
    overdue=MINUTE * 1000,
    retry_after=RetryAfter(None, least=MINUTE, most=DAY),
    terminal_errors=_SWITCHED_OFF,
    disable_on=frozenset({410}),
    deadline=10.0,
    keep_bytes=0,
    replay_window=30 * DAY,
    replay_from_event=True,
    signature="elicitra",
    envelope=True,
    max_body_bytes=262_144,
    https_443=True,
    fixed_url=True,
    challenge=True,
    catalogue="betterstood",
    when_inactive="skip",
    credits=1,
    states=(("exhausted", "dead_letter"), ("terminal", "dead_letter"), ("disable", "dead_letter")),
)

KINGMINOS = Contract(
    name="kingminos",
    title="KingMinos",
    steps=(
        Step(60_000, 60_000, draws=301, grain=1000),  # "plus 0-300 seconds of per-delivery jitter"
        *(Step.around(seconds) for seconds in (120, 240, 480, 960, 1_800, 3_600)),
    ),
    terminal=frozenset({404, 413}),
    terminal_errors=_SWITCHED_OFF | {"blocked_address"},
    disable_after=20,
    deadline=10.0,
    patience=120,  # "each can land up to about 2 minutes later"
    signature="kingminos",
    headers=("kingminos-delivery-id: {delivery}", *STANDARD.headers),
    event_prefix="kmevt",
    when_inactive="dead",
    coarse_errors=True,
)

# Those that an endpoint may follow.
CONTRACTS: dict[str, Contract] = {contract.name: contract for contract in (STANDARD, BRIEF, BETTERSTOOD, KINGMINOS)}


_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_CLOCK = r"(?P<hour>[01][0-9]|2[0-3]):(?P<minute>[0-5][0-9]):(?P<second>[0-5][0-9]|60)"
_SHORT_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG_DAY = "(?:Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)"
# RFC 9110 section 5.6.7: IMF-fixdate, and the two obsolete forms that a recipient must accept.
_HTTP_DATES = tuple(
    re.compile(form)
    for form in (
        # `-0000` is how mail writes a time in UTC; senders that reuse its code write that.
        rf"{_SHORT_DAY}, (?P<day>[0-9]{{2}}) (?P<month>{_MONTHS}) (?P<year>[0-9]{{4}}) {_CLOCK} (?:GMT|-0000)",
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
    if re.fullmatch("[0-9]{1,1000}", value):  # more than that is no time that anybody meant
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
