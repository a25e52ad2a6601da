"""RQ's entry points: the worker that hosts a pump, and the periodic jobs. The only module that knows RQ."""

import contextlib
import logging
import resource
import threading
import time
from types import FrameType
from typing import Any

import django_rq
import redis
from django.conf import settings
from django.core.management import call_command
from django_rq.cron import DjangoCronScheduler
from rq import SimpleWorker
from rq.cron import CronJob
from rq.exceptions import StopRequested
from rq.utils import now

from deliveries.models import ReplayJob
from deliveries.pump import Pump
from deliveries.services import step_replay_job

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 2  # between steps of the replay jobs


class HubWorker(SimpleWorker):
    """A worker without RQ's own scheduler, which nothing of ours uses: two processes less, and none to outlive it."""

    def _start_scheduler(self, *args: Any, **kwargs: Any) -> None:
        """Starts none."""


class PumpWorker(HubWorker):
    """A worker that always has a pump to run, and tells it when to stop.

    Whatever happens to the jobs in Redis, a worker that finds its queue empty puts a pump there.
    """

    stopping = False

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: int | None = None) -> Any:
        """As RQ's, but never idle for more than a second. The signal to stop raises StopRequested out of it."""
        queue = django_rq.get_queue(settings.PUMP_QUEUE)  # not self.queues: they know nothing of our serializer
        while True:
            if not queue.count:
                queue.enqueue(run_pump)
            if found := super().dequeue_job_and_maintain_ttl(1, max_idle_time=1):
                return found

    def handle_warm_shutdown_request(self) -> None:
        """Lets the pump that runs in this process come to its end."""
        PumpWorker.stopping = True
        super().handle_warm_shutdown_request()  # type: ignore[no-untyped-call]

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:
        """Nothing: pool and terminal both send a signal, and the pump ends soon enough by itself."""


def run_pump() -> None:
    """Runs a pump for `PUMP_SECONDS`, or until its worker is told to stop.

    While Redis is away the pump goes on: its worker could not get another one.
    """
    # A request in flight takes two descriptors and an idle connection one; 1,024 is what systems give by default.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    end = time.monotonic() + settings.PUMP_SECONDS
    pump = Pump()
    pump.run(lambda: PumpWorker.stopping or (time.monotonic() >= end and pump.hears_wake_ups))


def run_replay_jobs() -> None:
    """Moves every open replay job on by as many deliveries as its rate allows since the last time."""
    for job in ReplayJob.objects.filter(state__in=[ReplayJob.State.QUEUED, ReplayJob.State.RUNNING]).order_by("id"):
        step_replay_job(job.pk, job.rate * REPLAY_SECONDS)


def clear_sessions() -> None:
    """Removes login sessions that have expired."""
    call_command("clearsessions")


class Clock(DjangoCronScheduler):
    """Queues the periodic jobs. One that still waits is not queued again, and Redis being away stops nothing.

    RQ's own scheduler queues with pickle whatever the settings say; this one uses the queue as it is configured.
    """

    def __init__(self) -> None:
        super().__init__(logging_level=logging.WARNING)
        self._stopped = threading.Event()
        self.register(run_replay_jobs, settings.JOBS_QUEUE, interval=REPLAY_SECONDS)
        self.register(clear_sessions, settings.JOBS_QUEUE, interval=86_400)

    def enqueue_jobs(self) -> list[CronJob]:
        """Queues what is due."""
        queue = django_rq.get_queue(settings.JOBS_QUEUE)
        queued = []
        for job in self.get_jobs():
            if job.func and job.should_run() and not queue.count:
                queue.enqueue(job.func)
                job.set_enqueue_time(now())
                queued.append(job)
        return queued

    def _request_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopped.set()
        super()._request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def run(self) -> None:
        """Works until it is told to stop."""
        while not self._stopped.is_set():
            try:
                self.start()  # type: ignore[no-untyped-call]
                return
            except redis.RedisError as error:
                logger.warning("Redis is away, periodic jobs wait: %s", error)
                with contextlib.suppress(StopRequested):
                    self._stopped.wait(1.0)
