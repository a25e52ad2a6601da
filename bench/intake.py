"""Posts per second of one web process: the fast lane, and what it is compared with in the same process.

Each round lets every contestant go once, on empty tables. No worker runs.
"""

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from bench import harness
from bench.load import Order, post

ROUNDS = 5
BATCH = 100
WARM_UP = 640  # requests to each path, at first
CONTESTANTS = {  # name -> path, requests of a round, events of each
    "per": ("/v1/events", 6_000, 0),
    "floor": ("/floor", 6_000, 0),
    "drf": ("/drf", 1_500, 0),
    "batch": ("/v1/events/batch", 200, BATCH),
    "nothing": ("/nothing", 6_000, 0),
}


@contextlib.contextmanager
def web(tenant: Any) -> Iterator[int]:
    """One web process with all contestants (bench/entry.py); its port."""
    from endpoints.models import Endpoint

    port = harness.free_port()
    endpoint = Endpoint.objects.get(tenant=tenant)
    environment = {**os.environ, "BENCH_TENANT": str(tenant.pk), "BENCH_ENDPOINT": str(endpoint.pk)}
    command = [sys.executable, "-m", "uvicorn", "bench.entry:application", "--port", str(port), "--no-access-log"]
    process = subprocess.Popen(
        [*command, "--log-level", "warning"], cwd=harness.ROOT, env=environment, stdout=sys.stderr
    )
    try:
        harness.wait_for_port(port)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=40)


def empty() -> None:
    """Removes all events and their deliveries."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE deliveries_event, deliveries_delivery, deliveries_attempt CASCADE")
        cursor.execute("CHECKPOINT")


def measure(name: str, port: int, api_key: str, count: int = 0) -> tuple[float, float]:
    """Events per second of a contestant, and the client's share of that time; of a round's requests or of `count`."""
    path, requests, batch = CONTESTANTS[name]
    empty()
    posted = post(Order(port, path, api_key, count or requests, batch))
    return (count or requests) * (batch or 1) / posted.seconds, posted.cpu_seconds / posted.seconds


def main() -> None:
    """Runs it."""
    with harness.hub():
        tenant, api_key = harness.make_tenant("http://127.0.0.1:9000/")
        rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        with web(tenant) as port:
            for name in CONTESTANTS:
                measure(name, port, api_key, WARM_UP // (CONTESTANTS[name][2] or 1) + 32)
            for number in range(1, ROUNDS + 1):
                shown = []
                for name in CONTESTANTS:
                    rate, share = measure(name, port, api_key)
                    rates[name].append(rate)
                    shown.append(f"{name} {rate:,.0f}/s (client busy {share:.0%})")
                harness.say(f"round {number}: {', '.join(shown)}")
        ratios = [rate / floor for rate, floor in zip(rates["per"], rates["floor"], strict=True)]
        harness.finish(
            **{f"{name}_per_s": round(statistics.median(rates[name])) for name in ("floor", "drf", "batch")},
            per_s=round(statistics.median(rates["per"])),
            ratio=round(statistics.median(ratios), 3),
        )


if __name__ == "__main__":
    main()
