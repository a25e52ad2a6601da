"""What the benchmarks share: servers and databases of their own, a cheap receiver, events to send, a line of JSON."""

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# A worker each for the two cores, no buffering of the log while it is read, connections kept for ever.
NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 4096; }}
http {{
    log_format arrival '$msec $http_webhook_id $status';
    access_log {folder}/access.log arrival;
    client_body_temp_path {folder}/body;
    client_body_buffer_size 512k;
    proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000000;
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{ return 200; }}
    }}
}}
"""

# Arguments of Python: a pump in a process of its own, as a worker runs it.
PUMP = "import django; django.setup(); from deliveries.jobs import run_pump; run_pump()"


@contextlib.contextmanager
def hub(folder: str = "bench") -> Iterator[None]:
    """Django on embedded servers of its own, with empty databases, in a folder of `var/`."""
    shutil.rmtree(ROOT / "var" / folder, ignore_errors=True)
    os.environ.update(
        WEBHOOKHUB_VAR=str(ROOT / "var" / folder),
        DJANGO_SETTINGS_MODULE="webhookhub.settings",
        ALLOWED_NETWORKS="127.0.0.0/8",
        ALLOW_HTTP="1",
        LOG_LEVEL="WARNING",
    )
    os.environ.pop("DATABASE_URL", None)
    os.environ.pop("REDIS_URL", None)
    from webhookhub import embedded

    with embedded.servers():
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        yield


def free_port() -> int:
    """A TCP port on loopback that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class Witness:
    """nginx, which answers 200 and writes when each event arrived at about a tenth of what a Python receiver costs."""

    url: str
    log: Path

    def arrivals(self) -> dict[str, float]:
        """The first arrival of each event, Unix seconds by its webhook-id."""
        first: dict[str, float] = {}
        for line in self.log.read_text().splitlines():
            moment, event, _ = line.split()
            first.setdefault(event, float(moment))
        return first


@contextlib.contextmanager
def witness() -> Iterator[Witness]:
    """An nginx of our own."""
    if not (nginx := shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")):
        sys.exit("nginx is not installed: apt-get install nginx-light (script/bench does it as root)")
    folder = ROOT / "var" / "bench" / "nginx"
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX.format(folder=folder, port=port))
    process = subprocess.Popen([nginx, "-c", str(configuration), "-e", str(folder / "error.log")])
    try:
        wait_for_port(port)
        yield Witness(f"http://127.0.0.1:{port}/", folder / "access.log")
    finally:
        process.terminate()
        process.wait()


def wait_for_port(port: int, seconds: float = 20.0) -> None:
    """Returns when something listens on a loopback port."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise TimeoutError(f"nothing listens on 127.0.0.1:{port} after {seconds} s")


@contextlib.contextmanager
def running(*arguments: str, **environment: str) -> Iterator["subprocess.Popen[Any]"]:
    """A Python process with these arguments while the block runs."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def payload(size: int = 1024) -> bytes:
    """A JSON object of exactly `size` bytes, with some structure."""
    head = b'{"object":"invoice","amount":1999,"currency":"eur","customer":{"id":"cus_137","name":"Zo\\u00eb"},"note":"'
    return head + b"x" * (size - len(head) - 2) + b'"}'


def make_tenant(url: str, endpoints: int = 1) -> tuple[Any, str]:
    """A tenant with an API key (returned as text) and endpoints at a URL, the n-th of which asks for type `type.n`."""
    from endpoints.models import ApiKey, Endpoint, Tenant
    from endpoints.services import SYSTEM, create_api_key, create_endpoint

    tenant = Tenant.objects.create(name=f"bench {Tenant.objects.count()}")
    for number in range(endpoints):
        endpoint = Endpoint(tenant=tenant, name=f"receiver {number}", url=url, event_types=[f"type.{number}"])
        create_endpoint(endpoint=endpoint, actor=SYSTEM)
    return tenant, create_api_key(key=ApiKey(tenant=tenant, name="bench"), actor=SYSTEM)


def publish(tenant: Any, count: int, endpoints: int = 1) -> None:
    """Stores `count` events of 1 KB, each for one of the endpoints in turn."""
    from deliveries.publishing import NewEvent, publish_events

    for start in range(0, count, 500):
        numbers = range(start, min(start + 500, count))
        publish_events([NewEvent(tenant.pk, f"type.{number % endpoints}", payload()) for number in numbers])


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1000, 2), "p99_ms": round(cuts[98] * 1000, 2)}


def say(line: str) -> None:
    """A line for people; only the last line of a benchmark is for programs."""
    print(line, flush=True)


def finish(**figures: Any) -> None:
    """The result, as one line of JSON."""
    print(json.dumps(figures), flush=True)
