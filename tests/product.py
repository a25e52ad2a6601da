"""The running product: web and workers as processes of their own, on the tests' database."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import requests
from django.conf import settings
from django.db import connection

ROOT = Path(__file__).resolve().parent.parent


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Returns as soon as something holds; fails when it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.02)


class Product:
    """Starts and ends the processes; `url` is the web's, `environment` what those started from now on see."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._running: list[subprocess.Popen[bytes]] = []
        database = settings.DATABASE_URL.replace("/webhookhub", f"/{connection.settings_dict['NAME']}", 1)
        self.environment = {**os.environ, "DATABASE_URL": database, "LOG_LEVEL": "WARNING"}

    def start_web(self) -> subprocess.Popen[bytes]:
        """A web process, once it answers."""
        process = self._start(
            "-m", "uvicorn", "webhookhub.asgi:application", "--port", str(self.port), "--log-level", "error"
        )

        def answers() -> bool:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                return False
            return True

        wait_until(answers)
        return process

    def start_clock(self) -> subprocess.Popen[bytes]:
        """What queues the periodic jobs."""
        return self._start("manage.py", "clock")

    def start_jobs_worker(self) -> subprocess.Popen[bytes]:
        """A worker pool for the periodic jobs."""
        return self._start_pool("jobs", "HubWorker")

    def start_worker(self) -> subprocess.Popen[bytes]:
        """A worker pool with one pump."""
        return self._start_pool("pump", "PumpWorker")

    def _start_pool(self, queue: str, worker: str) -> subprocess.Popen[bytes]:
        return self._start(
            *("manage.py", "rqworker-pool", queue, "-v", "0", "--num-workers", "1"),
            *("--worker-class", f"deliveries.jobs.{worker}", "--serializer", "rq.serializers.JSONSerializer"),
        )

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        # A session of its own: killing the group takes the pool and its workers down at once.
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=self.environment, start_new_session=True)
        self._running.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a process and all its children, and waits for its end."""
        os.killpg(process.pid, number)
        process.wait(timeout=40)
        self._running.remove(process)

    def close(self) -> None:
        """Ends everything."""
        for process in list(self._running):
            self.kill(process)

    def post(self, api_key: str, body: bytes, session: requests.Session | None = None) -> requests.Response:
        """Posts an event."""
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        return (session or requests).post(f"{self.url}/v1/events", data=body, headers=headers, timeout=30)
