"""Nine endpoints beside one that hangs until the deadline: each event goes to all ten.

Throughput is taken from a backlog that one pump drains, the time from acceptance to arrival (p99) from a steady rate of
events well within capacity. Each is measured without the tenth endpoint and with it, in one run.
"""

import statistics
import subprocess
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


def arrivals_of(witness: harness.Witness, skip: int) -> list[tuple[str, float]]:
    """Each request's event and time, after those of before."""
    rows = [line.split() for line in witness.log.read_text().splitlines()[skip:]]
    return [(event, float(moment)) for moment, event, _ in rows]


def run_pump(until: Any, seconds: float) -> None:
    """Runs a pump until something is so; what hangs then is left."""
    from deliveries.pump import Pump

    end = time.monotonic() + seconds
    Pump(drain_seconds=0).run(lambda: until() or time.monotonic() > end)


def settle() -> None:
    """Forgets what is still under way, and what is known of the endpoints' health."""
    from deliveries.models import Delivery
    from endpoints.models import Endpoint

    Delivery.objects.exclude(state="delivered").update(state="discarded", claim_token=None, lease_until=None)
    Endpoint.objects.update(failures_in_a_row=0, failing_since=None, probe_at=None, probes=0, recovered_at=None)


def throughput(tenant: Any, witness: harness.Witness) -> float:
    """Arrivals per second at the nine, of a backlog."""
    from deliveries.models import Delivery

    skip = len(witness.log.read_text().splitlines())
    harness.publish(tenant, BACKLOG)
    wanted = BACKLOG * OTHERS
    run_pump(lambda: Delivery.objects.filter(state="delivered").count() >= wanted + skip, 90)
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
    run_pump(done.is_set, SECONDS + 30)
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


def main() -> None:
    """Runs it."""
    with harness.hub(), harness.witness() as witness:
        from endpoints.models import Endpoint
        from endpoints.services import SYSTEM, create_endpoint

        tenant, _ = harness.make_tenant(witness.url)
        for number in range(1, OTHERS):
            endpoint = Endpoint(tenant=tenant, name=str(number), url=witness.url, event_types=["type.0"])
            create_endpoint(endpoint=endpoint, actor=SYSTEM)
        port = harness.free_port()
        hanging = Endpoint(tenant=tenant, name="hangs", url=f"http://127.0.0.1:{port}/", event_types=["type.0"])
        silent = subprocess.Popen([sys.executable, "-m", "bench.silent", str(port), "0"], cwd=harness.ROOT)
        try:
            harness.wait_for_port(port)
            throughput(tenant, witness)  # to warm up
            without = [throughput(tenant, witness) for _ in range(ROUNDS)]
            without_p99 = harness.quantiles_ms(latencies(tenant, witness))["p99_ms"]
            create_endpoint(endpoint=hanging, actor=SYSTEM)
            beside = [throughput(tenant, witness) for _ in range(ROUNDS)]
            beside_p99 = harness.quantiles_ms(latencies(tenant, witness))["p99_ms"]
        finally:
            silent.terminate()
            silent.wait()
        harness.say(
            f"per second: without {[round(one) for one in without]}, beside it {[round(one) for one in beside]}"
        )
        harness.finish(
            per_s=round(statistics.median(without)),
            per_s_beside=round(statistics.median(beside)),
            ratio=round(statistics.median(beside) / statistics.median(without), 3),
            p99_ms=without_p99,
            p99_ms_beside=beside_p99,
            p99_ratio=round(beside_p99 / without_p99, 2),
        )


if __name__ == "__main__":
    main()
