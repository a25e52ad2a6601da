"""What one claim of 200 deliveries costs, with few and many waiting, and after much churn under an old snapshot.

Each case keeps as many waiting as its name says: what was claimed is recorded as delivered and as many are added, so
that every claim finds the same. Rows are written straight into the table, as the fan-out would leave them. At last a
claim that may have nothing of what waits: how long it takes, and how late it is with a delivery of another endpoint.
"""

import contextlib
import gc
import statistics
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from bench import harness

ROWS = 200  # of one claim
CLAIMS = 150
WARM_UP = 10
CHURN = 500_000
ENDPOINTS = 10_000
LAGGING_SECONDS = 20

ADD = """
INSERT INTO deliveries_delivery
    (id, event_id, endpoint_id, contract, trigger, attempts_made, state, last_error, due_at, created_at)
SELECT hub_uuid7(), (%(events)s::uuid[])[1 + n %% %(event_count)s],
       (%(endpoints)s::uuid[])[1 + n %% %(endpoint_count)s], 'standard', 'automatic', 0, 'pending', '',
       now() - %(ago)s * interval '1 second' * (1 - n::float8 / %(count)s), now()
FROM generate_series(0, %(count)s - 1) n
"""


class Table:
    """The deliveries, with the events and endpoints that they are of."""

    def __init__(self, tenant: Any, endpoints: list[Any], events: list[Any]) -> None:
        self.tenant, self.endpoints, self.events = tenant, endpoints, events

    def add(self, count: int, *, endpoints: int, ago: float = 0.0, skip: int = 0) -> None:
        """Adds deliveries that are due, spread over so many endpoints after the first `skip`, and over so many seconds
        of the past.
        """
        from webhookhub.database import run

        params = {
            "events": [one.pk for one in self.events],
            "event_count": len(self.events),
            "endpoints": [one.pk for one in self.endpoints[skip : skip + endpoints]],
            "endpoint_count": endpoints,
            "ago": ago,
            "count": count,
        }
        run("default", ADD, params)

    def empty(self) -> None:
        """Removes them all."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE deliveries_delivery, deliveries_attempt CASCADE")
        self.tend()

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


def make_claimer() -> Any:
    """A claimer of first tries as a pump has it."""
    from deliveries.claiming import Claimer

    return Claimer(priority=0, endpoint_limit=ROWS, page_rows=ROWS, lease=timedelta(minutes=1))


def claim(claimer: Any, busy: Any = None, *, free: int = 1_000_000) -> tuple[uuid.UUID, list[Any], float]:
    """Claims once. Returns the token, the rows, and how long it took, in seconds."""
    from deliveries.claiming import Busy

    busy = busy or Busy()
    start = time.perf_counter()
    token, rows = claimer.claim(min(ROWS, free), busy, free=free)
    return token, rows, time.perf_counter() - start


def delivered(token: uuid.UUID, rows: list[Any]) -> list[Any]:
    """The results of claimed rows that have arrived."""
    from deliveries.querysets import Result
    from webhookhub.ids import uuid7

    return [
        Result(
            delivery_id=row.id,
            endpoint_id=row.endpoint_id,
            token=token,
            state="delivered",
            outcome="succeeded",
            id=uuid7(),
            number=1,
            started_at=datetime.now(UTC),
            url=row.url,
            address="192.0.2.1",
            status=200,
            wait_us=500,
            total_us=900,
            request_headers=["content-type: application/json"],
            response_headers=["Content-Length: 0"],
        )
        for row in rows
    ]


def settle(token: uuid.UUID, rows: list[Any]) -> float:
    """Records these as delivered. Returns how long it took, in seconds."""
    from deliveries.results import record_results

    results = delivered(token, rows)
    start = time.perf_counter()
    record_results(results)
    return time.perf_counter() - start


def waiting(table: Table, count: int, *, endpoints: int) -> tuple[list[float], list[float]]:
    """How long each claim took with so many waiting, and to record it, in seconds."""
    table.empty()
    table.add(count, endpoints=endpoints, ago=3_600)
    table.tend()
    claimer, claims, records = make_claimer(), [], []
    for _ in range(WARM_UP + CLAIMS):
        token, rows, seconds = claim(claimer)
        if len(rows) < ROWS:
            raise SystemExit(f"a claim found {len(rows)} of {ROWS}")
        claims.append(seconds)
        records.append(settle(token, rows))
        table.add(len(rows), endpoints=endpoints)
    return claims[WARM_UP:], records[WARM_UP:]


@contextlib.contextmanager
def old_snapshot() -> Iterator[None]:
    """A transaction that sees all as it was, as a backup or a report holds one open: nothing can be cleaned away."""
    from django.db import connections

    other = connections.create_connection("default")
    with other.cursor() as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT 1")
        yield
    other.close()


def churned(table: Table, count: int) -> tuple[list[float], list[float], float]:
    """How long each claim and each record took while so many deliveries passed under an old snapshot, and the first
    claim of a new pump after that, in seconds.
    """
    table.empty()
    claims, records = [], []
    with old_snapshot():
        claimer = make_claimer()
        for _ in range(count // 1_000):
            table.add(1_000, endpoints=100)
            for _ in range(1_000 // ROWS):
                token, rows, seconds = claim(claimer)
                claims.append(seconds)
                records.append(settle(token, rows))
        table.add(ROWS, endpoints=100)
        _, _, new = claim(make_claimer())
    return claims, records, new


def lagging(table: Table, count: int) -> tuple[list[float], list[float]]:
    """How long a claim took that found nothing while so many waited for an endpoint that may have no more, and how long
    after its commit a delivery of another endpoint was claimed, in seconds.
    """
    from collections import Counter

    from deliveries.claiming import Busy

    table.empty()
    table.add(count, endpoints=1, ago=3_600)
    table.tend()
    busy = Busy(Counter({table.endpoints[0].pk: ROWS}), Counter({table.tenant.pk: ROWS}))
    claimer, claims, late = make_claimer(), [], []
    end = time.monotonic() + LAGGING_SECONDS
    while time.monotonic() < end:
        _, rows, seconds = claim(claimer, busy, free=300)
        claims.append(seconds)
        if rows:
            raise SystemExit(f"a claim found {len(rows)} of an endpoint that may have no more")
        table.add(1, endpoints=1, skip=1)
        start = time.perf_counter()
        while not rows:
            token, rows, _ = claim(claimer, busy, free=300)
        late.append(time.perf_counter() - start)
        settle(token, rows)
    return claims, late


def figures(claims: list[float], base: list[float], **more: float) -> dict[str, Any]:
    """What is told of a case: milliseconds, and the ratio of the medians."""
    p50 = statistics.median(claims)
    return {
        "p50_ms": round(p50 * 1000, 2),
        "max_ms": round(max(claims) * 1000, 1),
        "ratio": round(p50 / statistics.median(base), 2),
        **{key: round(value * 1000, 2) for key, value in more.items()},
    }


def main() -> None:
    """Runs it; with an argument, every size is divided by it."""
    part = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    sizes = (1_000, 100_000 // part, 1_000_000 // part)
    with harness.hub():
        from webhookhub.database import settle_planner

        table = make_table()
        cases: list[dict[str, Any]] = []
        idle: list[dict[str, Any]] = []
        settle_planner(look_ups=True)
        gc.freeze()  # as a pump does with what is there when it starts

        def told(to: list[dict[str, Any]], name: str, rows: int, case: dict[str, Any]) -> None:
            to.append({"name": name, "rows": rows, **case})
            harness.say(", ".join(f"{key} {value}" for key, value in to[-1].items()))

        for name, endpoints in (("one endpoint", 1), ("10,000 endpoints", ENDPOINTS)):
            base: list[float] = []
            for count in sizes:
                claims, records = waiting(table, count, endpoints=endpoints)
                base = base or claims
                told(cases, name, count, figures(claims, base, record_p50_ms=statistics.median(records)))
        claims, records, new = churned(table, CHURN // part)
        first, last = claims[WARM_UP : WARM_UP + CLAIMS], claims[-CLAIMS:]
        case = figures(last, first, record_p50_ms=statistics.median(records[-CLAIMS:]), new_pump_ms=new)
        told(cases, "churn under an old snapshot", CHURN // part, {**case, "max_ms": round(max(claims) * 1000, 1)})
        base = []
        for count in (sizes[0], sizes[-1]):
            claims, late = lagging(table, count)
            base = base or claims
            p95 = statistics.quantiles(late, n=20, method="inclusive")[-1]
            case = figures(claims, base, late_p50_ms=statistics.median(late), late_p95_ms=p95, late_max_ms=max(late))
            told(idle, "a lagging endpoint", count, case)
        harness.finish(cases=cases, lagging=idle, ratio=max(case["ratio"] for case in cases))


if __name__ == "__main__":
    main()
