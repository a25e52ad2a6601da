"""`script/up`: the whole product on one machine, under one process manager."""

import io
import os
import socket
import sys
import threading
import time
from pathlib import Path

import redis
from honcho import manager
from honcho.manager import Manager
from honcho.printer import Printer

from webhookhub import embedded
from webhookhub.env import SettingError, env_int

ROOT = Path(__file__).resolve().parent.parent
# Honcho kills what has not stopped by then. A pump lets what is in flight end: 15 s of deadline and some to record.
manager.KILL_WAIT = 30


def main() -> None:
    """Sets up, starts everything, and returns when all of it has stopped."""
    os.chdir(ROOT)
    try:
        web, receiver = env_int("PORT", 8000, minimum=1), env_int("RECEIVER_PORT", 8001, minimum=1)
        if max(web, receiver) > 65_535 or web == receiver:
            raise SettingError(f"PORT ({web}) and RECEIVER_PORT ({receiver}) must be two ports, of at most 65535")
        for name, port in (("PORT", web), ("RECEIVER_PORT", receiver)):
            _check_free(name, port)
        # The demo's receiver is on loopback and speaks plain HTTP; a real installation opens neither.
        os.environ.setdefault("ALLOWED_NETWORKS", "127.0.0.1/32")
        os.environ.setdefault("ALLOW_HTTP", "1")
        os.environ.setdefault("GENERATE_SECRETS", "1")
        with embedded.servers():
            code = _run(web, receiver)
    except SettingError as error:
        sys.exit(f"script/up: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code)


def _check_free(name: str, port: int) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise SettingError(
            f"port {port} cannot be used: {reason}. Stop what uses it (another script/up?), or set {name} to another"
        ) from error


def _run(web: int, receiver: int) -> int:
    how_to_use = _set_up(web, receiver)
    everything = Manager(Printer(sys.stdout))
    for name, command in _commands(sys.executable, web, receiver).items():
        everything.add_process(name, command, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    threading.Thread(target=_say_when_ready, args=(web, receiver, how_to_use), daemon=True).start()
    everything.loop()
    stopped_by_hand = everything.returncode in (130, 143)
    return 0 if stopped_by_hand else int(everything.returncode or 0)


def _set_up(web: int, receiver: int) -> str:
    """Brings the database up to date, and returns what the demo says."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "webhookhub.settings"
    import django
    from django.core.management import call_command
    from django.db import OperationalError, connections

    django.setup()
    said = io.StringIO()
    try:
        call_command("migrate", verbosity=0)
        call_command("demo", web_port=web, receiver_port=receiver, stdout=said)
        redis.Redis.from_url(os.environ["REDIS_URL"]).ping()
    except OperationalError as error:
        raise SettingError(f"the database of DATABASE_URL cannot be used: {error}") from error
    except redis.RedisError as error:
        raise SettingError(f"the server of REDIS_URL cannot be used: {error}") from error
    connections.close_all()
    return said.getvalue()


def _commands(python: str, web: int, receiver: int) -> dict[str, str]:
    """The processes, by name. Production runs the same ones under its own supervisor (docs/operations.md)."""
    pool = f"exec {python} manage.py rqworker-pool -v 0 --serializer rq.serializers.JSONSerializer"
    return {
        "web": f"exec {python} -m uvicorn webhookhub.asgi:application --host 127.0.0.1 --port {web}"
        f" --workers {env_int('WEB_WORKERS', 1, minimum=1)} --no-access-log --log-level warning"
        " --timeout-graceful-shutdown 20",
        "pump": f"{pool} pump --worker-class deliveries.jobs.PumpWorker --num-workers {env_int('PUMPS', 1, minimum=1)}",
        "jobs": f"{pool} jobs --worker-class deliveries.jobs.HubWorker --num-workers 1",
        "clock": f"exec {python} manage.py clock",
        "receiver": f"exec {python} manage.py receive --port {receiver}",
    }


def _say_when_ready(web: int, receiver: int, how_to_use: str) -> None:
    for port in (web, receiver):
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
    print(how_to_use, flush=True)


if __name__ == "__main__":
    main()
