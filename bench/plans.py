"""The plans of the hot statements, as the product ran them with 1,000,000 deliveries waiting: writes docs/queries.md.

PostgreSQL's auto_explain tells them, so that they are those of the prepared statements and not of a copy.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from bench import harness
from bench.claim import ROWS, claim, make_claimer, make_table, settle

WAITING = 1_000_000
EVENTS = 100
RECEIVERS = 10
RENEWED = timedelta(minutes=1)
LOST = "lost()"  # it is Django's, and has no name
STALE = "CLAIM_THESE after a quiet time"

HEAD = """# Query plans

The hot statements on {waiting:,} waiting deliveries of 10,000 endpoints, as auto_explain told them while the product
ran them (PostgreSQL {version}). Written by `script/bench plans`: do not edit. The first line of each has the buffers
and the time of the whole. What to look for after a change: no `Seq Scan`, no `Sort`, and rows and buffers that grow
with the batch, never with the table.
"""
# What to look at in each.
NOTES = {
    "STORE_EVENTS": "100 events, each for ten endpoints: one insert of each kind, endpoints found by their tenant.",
    "PAGE": "A page off the index from the position on, no sort, whatever stands before it.",
    "CLAIM_THESE": "Each row by its key; what a request needs (event, endpoint, tenant, secrets) by its key, too.",
    STALE: "The same where little waited when the statistics were taken: it should go by key too.",
    "CLAIM_LAGGING": "The next of each endpoint, from a position of its own: as many rows of the index as are claimed.",
    "RECORD": "States by key, attempts and credits in the same statement.",
    "RENEW": "By key, only what this pump has in flight. Each row's entries in all indexes are written anew.",
    LOST: "The index holds what is being sent; only what has run out of it is read, and interruptions by delivery.",
}
# Of a plan's lines: the steps, what they go by, and what it cost.
KEPT = re.compile(r"\(actual |Index Cond|Filter|Sort Key|CTE |Conflict|SubPlan|never executed")
COSTS = re.compile(r" +\(cost=[^)]*\)")


@dataclass(frozen=True)
class Plan:
    """The plan of one run of a statement. `milliseconds` are those of the run, with what it costs to watch it."""

    name: str
    milliseconds: float
    lines: list[str]

    @property
    def rows(self) -> float:
        """The most rows of a step."""
        return max((float(found) for found in re.findall(r"actual rows=([0-9.]+)", "\n".join(self.lines))), default=0)

    def __str__(self) -> str:
        shown = [COSTS.sub("", line).rstrip() for line in self.lines if KEPT.search(line)]
        buffers = next((line.strip() for line in self.lines if "Buffers:" in line), "Buffers: none")
        return "\n".join([f"{buffers}; {self.milliseconds:.1f} ms", *shown])


def _words(sql: str) -> str:
    """A statement without what differs between its template and what the server saw."""
    return " ".join(re.sub(r"%\(\w+\)s|\$\d+", "?", sql).replace("%%", "%").split())


@contextlib.contextmanager
def explained() -> Iterator[list[Plan]]:
    """Gathers the plans of what this thread's connection runs meanwhile."""
    from django.db import connection

    from deliveries import querysets

    names = {_words(text): name for name, text in vars(querysets).items() if name.isupper() and isinstance(text, str)}
    plans: list[Plan] = []

    def note(diagnostic: Any) -> None:
        if not (found := re.match(r"duration: ([0-9.]+) ms +plan:\nQuery Text: ", diagnostic.message_primary or "")):
            return
        lines = diagnostic.message_primary[found.end() :].split("\n")
        start = next((number for number, line in enumerate(lines) if COSTS.search(line)), len(lines))
        name = names.get(_words("\n".join(lines[:start])), LOST)
        plans.append(Plan(name, float(found[1]), lines[start:]))

    with connection.cursor() as cursor:
        cursor.execute("LOAD 'auto_explain'")
        for name in ("analyze", "buffers"):
            cursor.execute(f"SET auto_explain.log_{name} = on")
        cursor.execute("SET auto_explain.log_timing = off; SET client_min_messages = log")
        cursor.execute("SET auto_explain.log_parameter_max_length = 0; SET auto_explain.log_min_duration = 0")
        assert connection.connection is not None
        connection.connection.add_notice_handler(note)
        yield plans
        connection.connection.remove_notice_handler(note)
        cursor.execute("SET auto_explain.log_min_duration = -1")


def work() -> list[Plan]:
    """Has the product run each of its hot statements. Returns their plans."""
    from django.db import connection, transaction

    from deliveries.claiming import Busy
    from deliveries.models import Delivery
    from deliveries.publishing import NewEvent, publish_events
    from webhookhub.database import settle_planner

    table = make_table()
    tenant, _ = harness.make_tenant("https://hooks.example.com/", RECEIVERS)
    type(table.endpoints[0]).objects.filter(tenant=tenant).update(event_types=["type.0"])
    table.add(WAITING, endpoints=len(table.endpoints), ago=3_600)
    table.tend()
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    settle_planner()  # as the threads that take events in
    with explained() as plans:
        for _ in range(2):  # the second finds the server's caches warm
            publish_events([NewEvent(tenant.pk, "type.0", harness.payload()) for _ in range(EVENTS)])
    settle_planner(look_ups=True)
    claimer, ten = make_claimer(), [one.pk for one in table.endpoints[1:11]]
    busy = Busy(Counter(dict.fromkeys(ten, ROWS)), Counter({table.tenant.pk: ROWS}))
    with explained() as more:
        for endpoints in (busy, busy, Busy(), Busy()):  # the ten lag behind, and then may have more
            token, rows, _ = claim(claimer, endpoints, free=1_000)
            Delivery.objects.all().renew({row.id: token for row in rows}, RENEWED)
            settle(token, rows)
        token, rows, _ = claim(claimer)
        Delivery.objects.all().renew({row.id: token for row in rows[:EVENTS]}, -RENEWED)
        with transaction.atomic():
            list(Delivery.objects.all().lost(500))
    table.empty()
    table.add(WAITING // 10, endpoints=len(table.endpoints), ago=3_600)
    Delivery.objects.update(state="delivered")
    table.tend()
    table.add(WAITING, endpoints=len(table.endpoints), ago=60)
    with explained() as stale:
        claim(make_claimer())
    return [*plans, *more, *(replace(plan, name=STALE) for plan in stale if plan.name == "CLAIM_THESE")]


def main() -> None:
    """Runs it."""
    with harness.hub():
        from django.db import connection

        plans = work()
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            [version] = cursor.fetchone() or [""]
    parts, times = [HEAD.format(waiting=WAITING, version=version)], {}
    for name, sentence in NOTES.items():
        if found := [plan for plan in plans if plan.name == name]:
            plan = max(reversed(found), key=lambda plan: plan.rows)
            parts.append(f"## `{name}`\n\n{sentence}\n\n```\n{plan}\n```\n")
            times[name] = plan.milliseconds
    (harness.ROOT / "docs" / "queries.md").write_text("\n".join(parts))
    harness.finish(waiting=WAITING, milliseconds=times, missing=[name for name in NOTES if name not in times])


if __name__ == "__main__":
    main()
