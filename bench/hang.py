"""Receivers beside one that hangs until the deadline, and tenants beside one with a queue.

Each event goes to nine endpoints, and then to a tenth as well, which hangs. Throughput is taken from a backlog that one
pump drains as fast as it can, the time from acceptance to arrival (p99) from a steady rate of events well within
capacity. Then a tenant posts at an easy rate: alone, beside another with 500 deliveries for a receiver that hangs, and
beside one with a long backlog: the time to its first attempts (p95).
"""

import statistics
import sys
import threading
import time
from typing import Any

from bench import harness

OTHERS = 9
BACKLOG = 2_000  # events of a round, each to nine or ten endpoints
ROUNDS = 3
PER_SECOND = 40
SECONDS = 30
STUCK = 500
LONG = 1_000_000
EASY_PER_SECOND = 20
EASY_WARM_UP, EASY_SECONDS = 5, 30


def arrivals_of(witness: harness.Witness, skip: int) -> list[tuple[str, float]]:
    """Each request's event and time, after those of before."""
    rows = [line.split() for line in witness.log.read_text().splitlines()[skip:]]
    return [(event, float(moment)) for moment, event, _ in rows]


def run_pump(until: Any, seconds: float) -> None:
    """Runs a pump until something is so of it; what hangs then is left."""
    from deliveries.pump import Pump

    end = time.monotonic() + seconds
    pump = Pump(drain_seconds=0)
    pump.run(lambda: until(pump) or time.monotonic() > end)


def settle() -> None:
    """Forgets what is still under way, and what is known of the endpoints' health."""
    from deliveries.models import Delivery
    from endpoints.models import Endpoint

    Delivery.objects.exclude(state="delivered").update(state="discarded", claim_token=None, lease_until=None)
    Endpoint.objects.update(failures_in_a_row=0, failing_since=None, probe_at=None, probes=0, recovered_at=None)


def throughput(tenant: Any, witness: harness.Witness) -> float:
    """Arrivals per second at the nine, of a backlog."""
    skip = len(witness.log.read_text().splitlines())
    harness.publish(tenant, BACKLOG)
    wanted = BACKLOG * OTHERS
    run_pump(lambda pump: pump.recorded >= wanted, 90)
    times = sorted(moment for _, moment in arrivals_of(witness, skip))
    if len(times) != wanted:
        raise SystemExit(f"{len(times)} of {wanted} arrived")
    settle()
    return wanted / (times[-1] - times[0])


def latencies(tenant: Any, witness: harness.Witness) -> list[float]:
    """From acceptance to each arrival at the nine, in seconds, at a steady rate."""
    from django.db import connection

    from deliveries.models import Event
    from deliveries.publishing import NewEvent, publish_events
    from webhookhub.ids import typeid

    skip = len(witness.log.read_text().splitlines())
    done = threading.Event()

    def post() -> None:
        start = time.monotonic()
        for number in range(PER_SECOND * SECONDS):
            time.sleep(max(0.0, start + number / PER_SECOND - time.monotonic()))
            publish_events([NewEvent(tenant.pk, "type.0", harness.payload())])
        time.sleep(2)
        done.set()
        connection.close()

    poster = threading.Thread(target=post)
    poster.start()
    run_pump(lambda _: done.is_set(), SECONDS + 30)
    poster.join()
    accepted = {
        typeid("evt", event.pk): event.accepted_at.timestamp()
        for event in Event.objects.only("accepted_at").order_by("-id")[: PER_SECOND * SECONDS]
    }
    found = [moment + 0.0005 - accepted[event] for event, moment in arrivals_of(witness, skip)]
    if len(found) != len(accepted) * OTHERS:
        raise SystemExit(f"{len(found)} of {len(accepted) * OTHERS} arrived")
    settle()
    return found


def first_tries(tenant: Any, witness: harness.Witness) -> list[float]:
    """From acceptance to arrival of events at an easy rate, in seconds, by a pump in a process of its own."""
    from deliveries.models import Event
    from deliveries.publishing import NewEvent, publish_events
    from webhookhub.ids import typeid

    accepted: dict[str, float] = {}
    with harness.running("-c", harness.PUMP, PUMP_SECONDS="600"):
        start = time.monotonic()
        for number in range(EASY_PER_SECOND * (EASY_WARM_UP + EASY_SECONDS)):
            time.sleep(max(0.0, start + number / EASY_PER_SECOND - time.monotonic()))
            event = NewEvent(tenant.pk, "type.0", harness.payload())
            publish_events([event])
            if number >= EASY_PER_SECOND * EASY_WARM_UP:
                accepted[typeid("evt", event.id)] = Event.objects.get(pk=event.id).accepted_at.timestamp()
        end, arrived = time.monotonic() + 30, witness.arrivals()
        while not accepted.keys() <= arrived.keys():
            if time.monotonic() > end:
                raise SystemExit(f"{len(accepted.keys() - arrived.keys())} of {len(accepted)} did not arrive")
            time.sleep(0.5)
            arrived = witness.arrivals()
    settle()
    return [arrived[event] + 0.0005 - moment for event, moment in accepted.items()]


def beside_queues(silent: str, witness: harness.Witness, backlog: int) -> dict[str, float]:
    """The times of a tenant's first attempts: alone, and beside each kind of queue of another."""
    from bench.claim import Table
    from deliveries.models import Delivery, Event
    from endpoints.models import Endpoint

    tenant, _ = harness.make_tenant(witness.url)
    alone = first_tries(tenant, witness)
    hung, _ = harness.make_tenant(silent)
    harness.publish(hung, STUCK)
    beside_stuck = first_tries(tenant, witness)
    long, _ = harness.make_tenant(witness.url)
    event = Event.objects.create(tenant=long, type="type.0", payload=harness.payload())
    table = Table(long, list(Endpoint.objects.filter(tenant=long)), [event])
    table.add(backlog, endpoints=1, ago=3_600)
    table.tend()
    beside_backlog = first_tries(tenant, witness)
    left = Delivery.objects.filter(endpoint=table.endpoints[0], state="discarded").count()
    harness.say(f"of a backlog of {backlog:,}, {left:,} were left")
    if not left:
        raise SystemExit("the backlog came to its end: give a longer one")
    named = {"alone": alone, "beside_stuck": beside_stuck, "beside_backlog": beside_backlog}
    figures: dict[str, float] = {}
    for name, times in named.items():
        cuts = statistics.quantiles(times, n=20, method="inclusive")
        figures |= {f"p50_ms_{name}": round(cuts[9] * 1000, 1), f"p95_ms_{name}": round(cuts[18] * 1000, 1)}
    return figures


def main() -> None:
    """Runs it; an argument is the length of the long backlog."""
    backlog = int(sys.argv[1]) if len(sys.argv) > 1 else LONG
    with harness.hub(), harness.witness() as witness:
        from endpoints.models import Endpoint
        from endpoints.services import SYSTEM, create_endpoint

        tenant, _ = harness.make_tenant(witness.url)
        for number in range(1, OTHERS):
            endpoint = Endpoint(tenant=tenant, name=str(number), url=witness.url, event_types=["type.0"])
            create_endpoint(endpoint=endpoint, actor=SYSTEM)
        port = harness.free_port()
        hanging = Endpoint(tenant=tenant, name="hangs", url=f"http://127.0.0.1:{port}/", event_types=["type.0"])
        with harness.running("-m", "bench.silent", str(port), "0"):
            harness.wait_for_port(port)
            throughput(tenant, witness)  # to warm up
            without = [throughput(tenant, witness) for _ in range(ROUNDS)]
            without_p99 = harness.quantiles_ms(latencies(tenant, witness))["p99_ms"]
            create_endpoint(endpoint=hanging, actor=SYSTEM)
            beside = [throughput(tenant, witness) for _ in range(ROUNDS)]
            beside_p99 = harness.quantiles_ms(latencies(tenant, witness))["p99_ms"]
            harness.say(
                f"per second: without {[round(one) for one in without]}, beside it {[round(one) for one in beside]}"
            )
            queues = beside_queues(hanging.url, witness, backlog)
        harness.finish(
            per_s=round(statistics.median(without)),
            per_s_beside=round(statistics.median(beside)),
            ratio=round(statistics.median(beside) / statistics.median(without), 3),
            p99_ms=without_p99,
            p99_ms_beside=beside_p99,
            p99_ratio=round(beside_p99 / without_p99, 2),
            **queues,
        )


if __name__ == "__main__":
    main()
