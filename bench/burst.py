"""A burst of single posts with the whole product running: how fast events arrive, and how long each is under way.

The floor of intake (bench/intake.py) is measured afterwards, on the same servers, with the product stopped.
"""

import statistics
import time

from bench import harness
from bench.idle import product
from bench.intake import empty, measure, web
from bench.load import Order, post

POSTS = 20_000
WARM_UP = 1_000
FLOOR_ROUNDS = 3
MOST_SECONDS = 120  # to wait for the last arrival


def arrivals(witness: harness.Witness, count: int) -> dict[str, float]:
    """The arrivals, once there are `count` or MOST_SECONDS are over."""
    end = time.monotonic() + MOST_SECONDS
    while len(arrived := witness.arrivals()) < count and time.monotonic() < end:
        time.sleep(0.5)
    return arrived


def main() -> None:
    """Runs it."""
    with harness.hub(), harness.witness() as witness:
        tenant, api_key = harness.make_tenant(witness.url)
        port = harness.free_port()
        with product(port):
            post(Order(port, "/v1/events", api_key, WARM_UP))
            arrivals(witness, WARM_UP)
            sent = post(Order(port, "/v1/events", api_key, POSTS, events=True)).sent
            arrived = arrivals(witness, WARM_UP + POSTS)
        if missing := [event for event in sent if event not in arrived]:
            raise SystemExit(f"{len(missing)} of {POSTS} events did not arrive")
        first = min(sent.values())
        posted_in, arrived_in = max(sent.values()) - first, max(arrived[event] for event in sent) - first
        harness.say(f"{POSTS:,} events posted in {posted_in:.1f} s, the last arrived after {arrived_in:.1f} s")
        empty()
        with web(tenant) as port:
            measure("floor", port, api_key, WARM_UP)
            floor = statistics.median(measure("floor", port, api_key)[0] for _ in range(FLOOR_ROUNDS))
        # nginx writes whole milliseconds, cut off: half of one is added for the middle.
        under_way = [arrived[event] + 0.0005 - moment for event, moment in sent.items()]
        harness.finish(
            delivered_per_s=round(POSTS / arrived_in),
            intake_floor_per_s=round(floor),
            ratio=round(POSTS / arrived_in / floor, 3),
            **harness.quantiles_ms(under_way),
        )


if __name__ == "__main__":
    main()
