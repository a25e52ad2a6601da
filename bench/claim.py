"""What one claim of 200 deliveries costs, with few and many waiting, and after much churn under an old snapshot.

Each case keeps as many waiting as its name says: what was claimed is recorded as delivered and as many are added, so
that every claim finds the same. Rows are written straight into the tables, as the fan-out would leave them.
"""

import statistics
import sys
import time
from typing import Any

from bench import harness

ROWS = 200  # of one claim
CLAIMS = 150
CHURN = 500_000
ENDPOINTS = 10_000

ADD = """
INSERT INTO deliveries_delivery
    (id, event_id, endpoint_id, contract, trigger, attempts_made, state, last_error, due_at, created_at)
SELECT hub_uuid7(), (%(events)s::uuid[])[1 + n %% %(event_count)s],
       (%(endpoints)s::uuid[])[1 + n %% %(endpoint_count)s], 'standard', 'automatic', 0, 'pending', '',
       now() - %(ago)s * interval '1 second' * (1 - n::float8 / %(count)s), now()
FROM generate_series(0, %(count)s - 1) n
"""
FINISH = """
UPDATE deliveries_delivery SET state = 'delivered', claim_token = NULL, lease_until = NULL, attempts_made = 1,
       last_status = 200, outcome = 'succeeded', finished_at = now()
WHERE id = ANY(%(ids)s)
"""


class Table:
    """The deliveries, with the events and endpoints that they are of."""

    def __init__(self, tenant: Any, endpoints: list[Any], events: list[Any]) -> None:
        self.tenant, self.endpoints, self.events = tenant, endpoints, events

    def add(self, count: int, *, endpoints: int, ago: float = 0.0) -> None:
        """Adds deliveries that are due, spread over so many endpoints and so many seconds of the past."""
        from webhookhub.database import run

        params = {
            "events": [one.pk for one in self.events],
            "event_count": len(self.events),
            "endpoints": [one.pk for one in self.endpoints[:endpoints]],
            "endpoint_count": endpoints,
            "ago": ago,
            "count": count,
        }
        run("default", ADD, params)

    def empty(self) -> None:
        """Removes them all."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE deliveries_delivery CASCADE")

    def tend(self) -> None:
        """What autovacuum does within its next minute."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE deliveries_delivery")


def make_table() -> Table:
    """Endpoints with secrets, and events of 1 KB."""
    from deliveries.models import Event
    from endpoints.models import Endpoint, EndpointSecret

    tenant, _ = harness.make_tenant("https://hooks.example.com/")
    secret = EndpointSecret.objects.get()
    made = [Endpoint(tenant=tenant, name=str(n), url="https://hooks.example.com/") for n in range(ENDPOINTS)]
    endpoints = Endpoint.objects.bulk_create(made, batch_size=1_000)
    EndpointSecret.objects.bulk_create(
        (EndpointSecret(endpoint=endpoint, sealed=secret.sealed) for endpoint in endpoints), batch_size=1_000
    )
    events = Event.objects.bulk_create(
        (Event(tenant=tenant, type="a", payload=harness.payload()) for _ in range(1_000)), batch_size=500
    )
    return Table(tenant, endpoints, events)


def claim(claimer: Any) -> tuple[list[Any], float]:
    """Claims once. Returns the rows, and how long it took, in seconds."""
    from deliveries.claiming import Busy

    start = time.perf_counter()
    _, rows = claimer.claim(ROWS, Busy(), free=1_000_000)
    return rows, time.perf_counter() - start


def finish(rows: list[Any]) -> None:
    """Records these as delivered."""
    from webhookhub.database import run

    run("default", FINISH, {"ids": [row.id for row in rows]})


def make_claimer() -> Any:
    """A claimer of first tries as a pump has it."""
    from datetime import timedelta

    from deliveries.claiming import Claimer

    return Claimer(priority=0, endpoint_limit=ROWS, page_rows=ROWS, lease=timedelta(minutes=1))


def waiting(table: Table, count: int, *, endpoints: int) -> float:
    """The median of a claim, in seconds, with so many waiting."""
    table.empty()
    table.add(count, endpoints=endpoints, ago=3_600)
    table.tend()
    claimer, times = make_claimer(), []
    for number in range(CLAIMS + 10):
        rows, seconds = claim(claimer)
        finish(rows)
        table.add(len(rows), endpoints=endpoints)
        if number >= 10:
            times.append(seconds)
            if len(rows) < ROWS:
                raise SystemExit(f"a claim found {len(rows)} of {ROWS}")
    return statistics.median(times)


def churned(table: Table, count: int) -> tuple[float, float]:
    """The median of a claim at first, and after so many deliveries under one old snapshot, in seconds."""
    from django.db import connections

    table.empty()
    table.tend()
    other = connections.create_connection("default")
    with other.cursor() as snapshot:
        snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM deliveries_delivery")
        claimer, times = make_claimer(), []
        for _ in range(count // 1_000):
            table.add(1_000, endpoints=100)
            for _ in range(1_000 // ROWS):
                rows, seconds = claim(claimer)
                finish(rows)
                times.append(seconds)
        snapshot.execute("ROLLBACK")
    other.close()
    return statistics.median(times[10 : 10 + CLAIMS]), statistics.median(times[-CLAIMS:])


def main() -> None:
    """Runs it; with an argument, every size is divided by it."""
    part = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with harness.hub():
        from webhookhub.database import settle_planner

        table = make_table()
        cases: list[dict[str, Any]] = []
        settle_planner(look_ups=True)
        for name, endpoints in (("one endpoint", 1), ("10,000 endpoints", ENDPOINTS)):
            base = 0.0
            for count in (1_000, 100_000 // part, 1_000_000 // part):
                seconds = waiting(table, count, endpoints=endpoints)
                base = base or seconds
                cases.append({"name": f"{name}, {count:,} waiting", "rows": count, "p50": seconds, "base": base})
                harness.say(f"{cases[-1]['name']}: {seconds * 1000:.2f} ms")
        first, last = churned(table, CHURN // part)
        name = f"{CHURN // part:,} churned through under an old snapshot"
        cases.append({"name": name, "rows": CHURN // part, "p50": last, "base": first})
        harness.say(f"{name}: {first * 1000:.2f} ms at first, {last * 1000:.2f} ms at last")
        harness.finish(
            cases=[
                {
                    "name": case["name"],
                    "rows": case["rows"],
                    "p50_ms": round(case["p50"] * 1000, 2),
                    "ratio": round(case["p50"] / case["base"], 2),
                }
                for case in cases
            ],
            ratio=round(max(case["p50"] / case["base"] for case in cases), 2),
        )


if __name__ == "__main__":
    main()
