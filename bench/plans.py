"""The plans of the hot statements, with 1,000,000 deliveries waiting: what docs/queries.md is made of."""

import re
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from bench import harness
from bench.claim import make_table

ROWS = 1_000_000
BATCH = 100
LONG = re.compile(r"'\{[^']{80,}\}'|\(actual rows=[0-9.]+ loops=0\)")


def show(title: str, sql: str, params: dict[str, Any]) -> None:
    """Prints the plan of a statement, in Markdown; what it has done is undone."""
    from django.db import connection, transaction

    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) {sql}", params)
        plan = [LONG.sub("'{...}'", row[0]) for row in cursor.fetchall()]
        transaction.set_rollback(True)
    harness.say(f"## {title}\n\n```\n" + "\n".join(line.rstrip() for line in plan) + "\n```\n")


def main() -> None:
    """Runs it."""
    with harness.hub():
        from django.db import connection

        from deliveries import querysets
        from deliveries.claiming import START
        from deliveries.models import Delivery
        from webhookhub.database import settle_planner

        table = make_table()
        table.add(ROWS, endpoints=10_000, ago=3_600)
        table.tend()
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")
        settle_planner(look_ups=True)
        lease, token = timedelta(minutes=1), uuid.uuid4()
        ids = list(Delivery.objects.order_by("due_at", "id").values_list("pk", flat=True)[:BATCH])
        middle = Delivery.objects.order_by("due_at").values_list("due_at", flat=True)[ROWS // 2]
        page = {"priority": 0, "after": middle, "after_id": START.id, "limit": 250}
        show("`PAGE`: the next due deliveries after a position", querysets.PAGE, page)
        claim = {"ids": ids, "token": token, "lease": lease}
        show("`CLAIM_THESE`: claims what was chosen", querysets.CLAIM_THESE, claim)
        lagging = {
            "endpoint": [one.pk for one in table.endpoints[:10]],
            "after": [START.due_at] * 10,
            "after_id": [START.id] * 10,
            "free": [10] * 10,
            "overdue": [0.0] * 10,
            "priority": 0,
            "token": token,
            "lease": lease,
        }
        show("`CLAIM_LAGGING`: claims for ten endpoints, each from its position", querysets.CLAIM_LAGGING, lagging)
        claimed = Delivery.objects.all().claim_these(ids, token=token, lease=lease)
        results = [
            querysets.Result(
                delivery_id=row.id,
                endpoint_id=row.endpoint_id,
                token=token,
                state="delivered",
                id=uuid.uuid4(),
                number=1,
                started_at=datetime.now(UTC),
                status=200,
                total_us=1_000,
            )
            for row in claimed
        ]
        record = {"results": msgspec.json.encode(results).decode()}
        show("`RECORD`: writes results and attempts", querysets.RECORD, record)
        show("`RENEW`: extends leases", querysets.RENEW, {"ids": ids, "tokens": [token], "lease": lease})


if __name__ == "__main__":
    main()
