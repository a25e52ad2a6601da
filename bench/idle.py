"""From sending a post to its arrival at the receiver, on a hub that has nothing else to do: 10 posts a second."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from bench import harness

PER_SECOND = 10
WARM_UP = 30
POSTS = 300


@contextlib.contextmanager
def product(port: int) -> Iterator[None]:
    """A web process and a worker with one pump, as production runs them."""
    commands = [
        [sys.executable, "-m", "uvicorn", "webhookhub.asgi:application", "--port", str(port), "--no-access-log"],
        [
            *(sys.executable, "manage.py", "rqworker-pool", "pump", "-v", "0", "--num-workers", "1"),
            *("--worker-class", "deliveries.jobs.PumpWorker", "--serializer", "rq.serializers.JSONSerializer"),
        ],
    ]
    processes = [
        subprocess.Popen(command, cwd=harness.ROOT, stdout=subprocess.DEVNULL, stderr=sys.stderr, env=os.environ)
        for command in commands
    ]
    try:
        harness.wait_for_port(port)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=40)


def main() -> None:
    """Runs it."""
    with harness.hub(), harness.witness() as witness:
        _, key = harness.make_tenant(witness.url)
        body = b'{"type":"type.0","data":' + harness.payload() + b"}"
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        port = harness.free_port()
        sent: dict[str, float] = {}
        with product(port):
            caller = http.client.HTTPConnection("127.0.0.1", port)
            start = time.monotonic()
            for number in range(WARM_UP + POSTS):
                time.sleep(max(0.0, start + number / PER_SECOND - time.monotonic()))
                moment = time.time()
                caller.request("POST", "/v1/events", body, headers)
                answer = json.loads(caller.getresponse().read())
                if number >= WARM_UP:
                    sent[answer["id"]] = moment
            time.sleep(1)
        arrived = witness.arrivals()
        if missing := [event for event in sent if event not in arrived]:
            raise SystemExit(f"{len(missing)} of {POSTS} events did not arrive")
        # nginx writes whole milliseconds, cut off: half of one is added for the middle.
        harness.finish(**harness.quantiles_ms([arrived[event] + 0.0005 - moment for event, moment in sent.items()]))


if __name__ == "__main__":
    main()
