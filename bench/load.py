"""A cheap client, a process of its own: posts as fast as its connections get answers. `post` runs it.

Requests are made before the clock starts; then each costs a send, a recv and a look at the answer's head.
"""

import json
import os
import select
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from bench import harness

CONNECTIONS = 32
SEND_BUFFER = 1_048_576  # a batch goes into it whole, so that no send waits


@dataclass(frozen=True)
class Order:
    """What to post: `count` requests to a path, each a batch of `batch` events, or a single event when that is 0."""

    port: int
    path: str
    api_key: str
    count: int
    batch: int = 0
    events: bool = False  # whether the events' ids and the moments of their posts are wanted


@dataclass(frozen=True)
class Posted:
    """What came of it. `cpu_seconds` is what the client itself used; `sent` has Unix seconds by event id."""

    seconds: float
    cpu_seconds: float
    sent: dict[str, float]


def post(order: Order) -> Posted:
    """Posts in another process. Exits unless every answer is a 202."""
    command = [sys.executable, "-m", "bench.load"]
    done = subprocess.run(
        command, cwd=harness.ROOT, input=json.dumps(asdict(order)).encode(), stdout=subprocess.PIPE, env=os.environ
    )
    if done.returncode:
        raise SystemExit(f"posting to {order.path} failed")
    return Posted(**json.loads(done.stdout))


def _requests(order: Order) -> list[bytes]:
    """The requests, every event with an idempotency key of its own."""
    name, payload = uuid.uuid4().hex, harness.payload()
    fields = f"Host: 127.0.0.1\r\nAuthorization: Bearer {order.api_key}\r\nContent-Type: application/json\r\n"
    requests = []
    for number in range(order.count):
        if order.batch:
            event = b'{"type":"type.0","data":%b,"idempotency_key":"%b-%d-%d"}'
            events = [event % (payload, name.encode(), number, index) for index in range(order.batch)]
            body, key = b'{"events":[' + b",".join(events) + b"]}", ""
        else:
            body, key = b'{"type":"type.0","data":%b}' % payload, f"Idempotency-Key: {name}-{number}\r\n"
        head = f"POST {order.path} HTTP/1.1\r\n{fields}{key}Content-Length: {len(body)}\r\n\r\n"
        requests.append(head.encode() + body)
    return requests


def _is_whole(answer: bytes) -> bool:
    head = answer.find(b"\r\n\r\n")
    if head < 0:
        return False
    start = answer.lower().index(b"content-length:", 0, head) + 15
    return len(answer) >= head + 4 + int(answer[start : answer.index(b"\r\n", start)])


def _connect(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    connection.connect(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _run(order: Order) -> Posted:
    waiting = _requests(order)[::-1]
    connections = {one.fileno(): one for one in (_connect(order.port) for _ in range(CONNECTIONS))}
    poll = select.epoll()
    parts: dict[int, bytes] = {}
    moments: dict[int, float] = {}
    answers: list[tuple[float, bytes]] = []
    cpu, start = time.process_time(), time.perf_counter()
    for number, connection in connections.items():
        poll.register(number, select.EPOLLIN)
        moments[number] = time.time()
        connection.sendall(waiting.pop())
    while len(answers) < order.count:
        for number, _ in poll.poll():
            received = connections[number].recv(65_536)
            answer = parts.pop(number, b"") + received
            if not received or answer[9:12] != b"202":
                sys.exit(f"{answer[:500]!r} is no 202")
            if not _is_whole(answer):
                parts[number] = answer
                continue
            answers.append((moments[number], answer))
            if waiting:
                moments[number] = time.time()
                connections[number].sendall(waiting.pop())
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    sent: dict[str, float] = {}
    if order.events:
        sent = {json.loads(answer.partition(b"\r\n\r\n")[2])["id"]: moment for moment, answer in answers}
    return Posted(seconds, cpu, sent)


def _main() -> None:
    order: Any = json.load(sys.stdin)
    print(json.dumps(asdict(_run(Order(**order)))))


if __name__ == "__main__":
    _main()
