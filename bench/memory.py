"""How much memory a pump and a web process take: with 2,000 requests in flight, and over a long time.

The pump and the web process are the real ones. RSS is read from /proc.
"""

import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import harness
from bench.load import Order, post

IN_FLIGHT = 2_000
TENANTS, ENDPOINTS = 40, 60  # of each tenant, at a receiver that answers late
PLACES = IN_FLIGHT * 10 // 9 + 1  # first tries leave a tenth to retries
WARM_UP = 20_000
DELIVERIES = 200_000
POSTS = 200_000


def rss_mb(process: "subprocess.Popen[Any]") -> float:
    """What a process has in memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def in_flight() -> tuple[int, float]:
    """How many requests a pump had in flight at most, and the RSS then."""
    from deliveries.models import Delivery

    port = harness.free_port()
    with harness.running("-m", "bench.silent", str(port), "10"):
        harness.wait_for_port(port)
        for _ in range(TENANTS):
            tenant, _ = harness.make_tenant(f"http://127.0.0.1:{port}/", ENDPOINTS)
            harness.publish(tenant, ENDPOINTS, ENDPOINTS)
        most, size = 0, 0.0
        with harness.running("-c", harness.PUMP, PUMP_IN_FLIGHT=str(PLACES), PUMP_SECONDS="600") as pump:
            end = time.monotonic() + 9
            while time.monotonic() < end:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
                    held = int(answer.read())
                most, size = max(most, held), max(size, rss_mb(pump))
                time.sleep(0.25)
    Delivery.objects.update(state="discarded", claim_token=None, lease_until=None)  # or the next pump takes them up
    if most < IN_FLIGHT:
        raise SystemExit(f"only {most} requests were in flight")
    return most, size


def delivering(witness: harness.Witness) -> tuple[float, float]:
    """The RSS of a pump after WARM_UP deliveries, and after DELIVERIES more."""
    tenant, _ = harness.make_tenant(witness.url, 10)
    with harness.running("-c", harness.PUMP, PUMP_SECONDS="1200") as pump:
        sizes = []
        for count in (WARM_UP, DELIVERIES):
            for _ in range(count // 5_000):
                harness.publish(tenant, 5_000, 10)
                wait_until_delivered()
            sizes.append(rss_mb(pump))
    return sizes[0], sizes[1]


def wait_until_delivered(seconds: float = 120.0) -> None:
    """Returns when nothing is due or under way."""
    from deliveries.models import Delivery

    end = time.monotonic() + seconds
    while Delivery.objects.in_hand().exists():
        if time.monotonic() > end:
            raise SystemExit("the pump does not get on")
        time.sleep(0.2)


def taking_in() -> tuple[float, float]:
    """The RSS of a web process after WARM_UP posts, and after POSTS more."""
    port = harness.free_port()
    _, key = harness.make_tenant("https://hooks.example.com/")
    command = ["-m", "uvicorn", "webhookhub.asgi:application", "--port", str(port), "--no-access-log"]
    with harness.running(*command, "--log-level", "warning") as web:
        harness.wait_for_port(port)
        sizes = []
        for count in (WARM_UP, POSTS):
            for _ in range(count // 20_000):
                post(Order(port, "/v1/events", key, 20_000))
            sizes.append(rss_mb(web))
    return sizes[0], sizes[1]


def main() -> None:
    """Runs it."""
    with harness.hub(), harness.witness() as witness:
        most, size = in_flight()
        harness.say(f"{most} requests in flight: {size:.0f} MB")
        before, after = delivering(witness)
        harness.say(f"a pump: {before:.0f} MB after {WARM_UP:,} deliveries, {after:.0f} MB after {DELIVERIES:,} more")
        web_before, web_after = taking_in()
        harness.say(
            f"a web process: {web_before:.0f} MB after {WARM_UP:,} posts, {web_after:.0f} MB after {POSTS:,} more"
        )
        harness.finish(
            in_flight=most,
            rss_mb=round(size, 1),
            growth_mb=round(after - before, 1),
            web_rss_mb=round(web_after, 1),
            web_growth_mb=round(web_after - web_before, 1),
        )


if __name__ == "__main__":
    main()
