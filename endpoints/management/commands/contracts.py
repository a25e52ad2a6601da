"""`manage.py contracts`: what each contract promises, as the table of docs/contracts.md."""

from typing import Any

from django.core.management.base import BaseCommand

from endpoints.contracts import CONTRACTS, Contract


class Command(BaseCommand):
    """Prints a table in Markdown, made from the values that the hub works by."""

    help = "Prints what each contract promises, the operator's own included, as a table in Markdown."

    def handle(self, *args: Any, **options: Any) -> None:
        """Prints it."""
        self.stdout.write(contracts_table(list(CONTRACTS.values())), ending="")


def contracts_table(contracts: list[Contract]) -> str:
    """A column for each contract, a row for each promise."""
    rows = [
        ("", [f"`{one.name}`" for one in contracts]),
        ("attempts", [str(one.max_attempts) for one in contracts]),
        ("times", [_times(one) for one in contracts]),
        ("counted from", ["the first attempt" if one.from_first else "the end of the one before" for one in contracts]),
        ("`Retry-After`", [_retry_after(one) for one in contracts]),
        ("ends at once", [_statuses(one.terminal) for one in contracts]),
        ("disables the endpoint", [_disables(one) for one in contracts]),
        ("a delivery that does not arrive is", [_ends(one) for one in contracts]),
        ("while the endpoint only fails, an attempt waits", [_patience(one) for one in contracts]),
        ("while the endpoint is not active", [_INACTIVE[one.when_inactive] for one in contracts]),
        ("can be sent again", [_replay(one) for one in contracts]),
        ("deadline", [_duration(int(one.deadline * 1000)) for one in contracts]),
        ("of an answer, read / kept", [f"{_size(one.read_bytes)} / {_size(one.keep_bytes)}" for one in contracts]),
        ("signature", [one.signature for one in contracts]),
        ("ids of events", [f"`{one.event_prefix}_…`" for one in contracts]),
        ("further headers", [_headers(one) for one in contracts]),
        ("body", [_body(one) for one in contracts]),
        ("URL", [_url(one) for one in contracts]),
        ("verification", ["challenge and paste-back" if one.challenge else "none" for one in contracts]),
    ]
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    lines.insert(1, "|---" * (len(contracts) + 1) + "|")
    return "\n".join(lines) + "\n"


_INACTIVE = {
    "hold": "kept, sent when it is again",
    "dead": "dead, unsent",
    "skip": "not made; what was under way is kept for a replay",
}


def _ends(contract: Contract) -> str:
    return ", ".join(dict.fromkeys(f"`{word}`" for _, word in contract.states))


def _patience(contract: Contract) -> str:
    return f"at most {_duration(contract.patience * 1000)}" if contract.patience else "not longer"


def _replay(contract: Contract) -> str:
    if contract.replay_window is None:
        return "always"
    begins = "the event" if contract.replay_from_event else "its end"
    return f"for {_duration(contract.replay_window * 1000)} from {begins}"


def _headers(contract: Contract) -> str:
    return ", ".join(f"`{line.partition(':')[0]}`" for line in contract.headers) or "none"


def _body(contract: Contract) -> str:
    most = f", {_size(contract.max_body_bytes)} at most" if contract.max_body_bytes else ""
    return ("CloudEvent around the payload" if contract.envelope else "the payload's bytes") + most


def _url(contract: Contract) -> str:
    parts = [
        word for word, is_so in (("https on port 443", contract.https_443), ("fixed", contract.fixed_url)) if is_so
    ]
    return ", ".join(parts) or "by the address rule"


def _times(contract: Contract) -> str:
    times = ", ".join(_duration(step.nominal) for step in contract.steps)
    first = contract.steps[0]
    early, late = ((first.nominal - first.least), (first.most - first.nominal))
    spread = f" (the first {_duration(first.least)} to {_duration(first.most)})" if early or late else ""
    return times + spread


def _retry_after(contract: Contract) -> str:
    rule = contract.retry_after
    if rule is None:
        return "ignored"
    on = "all but 2xx" if rule.statuses is None else _statuses(rule.statuses)
    effect = "takes the time's place" if rule.replaces else "the later of the two"
    late = f", up to {rule.late} % later" if rule.late else ""
    return f"on {on}: {effect}, {_duration(rule.least * 1000)} to {_duration(rule.most * 1000)}{late}"


def _disables(contract: Contract) -> str:
    ways = [_statuses(contract.disable_on)] if contract.disable_on else []
    ways += [f"{contract.disable_after} dead deliveries in a row"] if contract.disable_after else []
    return ", ".join(ways) or "never"


def _statuses(statuses: frozenset[int]) -> str:
    """Statuses as runs: 300 to 407, 409."""
    runs: list[list[int]] = []
    for status in sorted(statuses):
        if runs and status == runs[-1][-1] + 1:
            runs[-1].append(status)
        else:
            runs.append([status])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"


def _duration(milliseconds: int) -> str:
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds >= size and milliseconds % size == 0:
            return f"{milliseconds // size} {unit}"
    return f"{milliseconds / 1000:.1f} s" if milliseconds else "0 s"


def _size(count: int) -> str:
    return f"{count // 1024} KiB" if count and count % 1024 == 0 else f"{count} B" if count else "nothing"
