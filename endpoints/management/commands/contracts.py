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
        ("deadline", [_duration(int(one.deadline * 1000)) for one in contracts]),
        ("of an answer, read / kept", [f"{_size(one.read_bytes)} / {_size(one.keep_bytes)}" for one in contracts]),
        ("signature", [one.signature for one in contracts]),
    ]
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    lines.insert(1, "|---" * (len(contracts) + 1) + "|")
    return "\n".join(lines) + "\n"


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
