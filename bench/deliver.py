"""Deliveries per second of one pump process, and of the same work with nothing sent (the floor), in one run.

Each round publishes the same number of events of 1 KB, then times one pump, from the moment that its connections are
open and its statements prepared until all are recorded. At the end one and two pump processes drain a backlog, by the
receiver's clock.
"""

import statistics
import subprocess
import sys
import time
from typing import Any

from bench import harness

ROUNDS = 3
EVENTS = 10_000
WARM_UP = 3_000
ENDPOINTS = 10  # all at the same nginx


class Nothing:
    """A transport that sends nothing: every request is answered 200 at once."""

    in_flight = 0
    woken = False

    def __init__(self) -> None:
        self._requests: list[Any] = []

    def watch(self, wake_fd: int | None) -> None:
        """Nothing to watch."""

    def send(self, request: Any) -> None:
        """Keeps the request for the next wait."""
        self._requests.append(request)

    def wait(self, timeout: float) -> list[Any]:
        """An outcome for each request."""
        from datetime import UTC, datetime

        from deliveries.transport import Outcome, Timings

        requests, self._requests = self._requests, []
        now = datetime.now(UTC)
        timings = Timings(100, 100, None, 500, 900)
        head = ["Server: nginx", "Date: Mon, 30 Nov 2026 20:39:49 GMT", "Content-Type: text/plain", "Content-Length: 0"]
        return [Outcome(one, now, 200, "", "", "127.0.0.1", timings, head, b"", False) for one in requests]

    def close(self) -> None:
        """Nothing to close."""


def drain(transport: Any = None) -> float:
    """Runs a pump over WARM_UP and EVENTS deliveries that wait, and returns how many of the latter it did a second."""
    from deliveries.pump import Pump

    pump = Pump(transport=transport)
    limit = time.perf_counter() + 120
    warm_at: float | None = None

    def is_over() -> bool:
        nonlocal warm_at
        if warm_at is None and pump.recorded >= WARM_UP:
            warm_at = time.perf_counter()
        return pump.recorded >= WARM_UP + EVENTS or time.perf_counter() > limit

    pump.run(is_over)
    assert warm_at is not None
    return EVENTS / (time.perf_counter() - warm_at)


def drain_all() -> None:
    """Runs a pump until nothing is due; what one of several pump processes does."""
    import django

    django.setup()
    from deliveries.models import Delivery
    from deliveries.pump import Pump

    Pump().run(lambda: not Delivery.objects.in_hand().exists())


def together(count: int, witness: harness.Witness, tenant: Any) -> float:
    """Deliveries per second of so many pump processes over one backlog, from the first arrival to the last.

    Raises SystemExit when a delivery arrives twice or not at all.
    """
    before = len(witness.log.read_text().splitlines())
    harness.publish(tenant, count * EVENTS, ENDPOINTS)
    program = "from bench.deliver import drain_all; drain_all()"
    pumps = [subprocess.Popen([sys.executable, "-c", program], cwd=harness.ROOT) for _ in range(count)]
    for pump in pumps:
        pump.wait(timeout=120)
    lines = witness.log.read_text().splitlines()[before:]
    if len(lines) != count * EVENTS or len({line.split()[1] for line in lines}) != len(lines):
        raise SystemExit(f"of {count * EVENTS} deliveries {len(lines)} requests arrived")
    times = sorted(float(line.split()[0]) for line in lines)
    return len(times) / (times[-1] - times[0])


def main() -> None:
    """Runs it."""
    with harness.hub(), harness.witness() as witness:
        from deliveries.models import Delivery

        tenant, _ = harness.make_tenant(witness.url, ENDPOINTS)
        rates, floors = [], []
        for number in range(1, ROUNDS + 1):
            harness.publish(tenant, WARM_UP + EVENTS, ENDPOINTS)
            rates.append(drain())
            harness.publish(tenant, WARM_UP + EVENTS, ENDPOINTS)
            floors.append(drain(Nothing()))
            harness.say(f"round {number}: {rates[-1]:,.0f}/s delivered, {floors[-1]:,.0f}/s with nothing sent")
        arrived = len(witness.arrivals())
        left = Delivery.objects.exclude(state="delivered").count()
        if left or arrived != ROUNDS * (WARM_UP + EVENTS):
            raise SystemExit(f"{left} deliveries are not delivered and {arrived} events arrived")
        one, two = (together(count, witness, tenant) for count in (1, 2))
        harness.say(f"one pump process {one:,.0f}/s, two {two:,.0f}/s, no delivery twice")
        ratios = [rate / floor for rate, floor in zip(rates, floors, strict=True)]
        harness.finish(
            per_s=round(statistics.median(rates)),
            floor_per_s=round(statistics.median(floors)),
            ratio=round(statistics.median(ratios), 3),
            two_pumps_per_s=round(two),
            two_pumps_ratio=round(two / one, 3),
        )


if __name__ == "__main__":
    main()
