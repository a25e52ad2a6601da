"""RQ's entry points: the worker that hosts a pump, and the periodic jobs. The only module that knows RQ."""

import contextlib
import functools
import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

import django_rq
import redis
from django.conf import settings
from django.core.management import call_command
from django.db import close_old_connections
from django_rq.cron import DjangoCronScheduler
from rq import SimpleWorker
from rq.cron import CronJob
from rq.exceptions import StopRequested
from rq.utils import now

from deliveries.claiming import Claimer, make_claimers
from deliveries.models import ReplayJob
from deliveries.publishing import repair_projection_gaps
from deliveries.pump import Pump
from deliveries.replays import step_replay_job
from deliveries.services import release_stranded
from webhookhub.limits import raise_descriptor_limit

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 2  # between steps of the replay jobs
FAULT_SECONDS = 1.0  # before the next pump after a fault of ours, which may come again at once
CLOCK_SECONDS = 0.5  # between two looks of the clock, at least
RESULT_SECONDS = 60  # for which Redis remembers a job that is done,
FAILURE_SECONDS = 86_400  # and one that failed: RQ's own year would let a fault that repeats fill it


class HubWorker(SimpleWorker):
    """A worker that stops when it is told to, and has none of RQ's own schedulers beside it.

    RQ says "stop" by an exception out of a signal handler, which the code that it happens to interrupt may swallow; a
    worker of ours also looks for the word between jobs, at least once a second. Nothing of ours uses RQ's scheduler.
    """

    def before_dequeue(self) -> None:
        """What is done each time before the worker looks for a job."""

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: int | None = None) -> Any:
        """As RQ's, but never idle for more than a second at a time; None when the worker is to stop."""
        while not self._stop_requested:
            self.before_dequeue()
            if found := super().dequeue_job_and_maintain_ttl(1, max_idle_time=1):
                return found
        return None

    def perform_job(self, *args: Any, **kwargs: Any) -> bool:
        """As RQ's, on a connection to the database that works: since the last job it may have been cut."""
        close_old_connections()
        return super().perform_job(*args, **kwargs)

    def handle_warm_shutdown_request(self) -> None:
        """Notes that the worker is to stop."""
        self._stop_requested = True
        super().handle_warm_shutdown_request()  # type: ignore[no-untyped-call]

    def set_shutdown_requested_date(self) -> None:
        """As RQ's, if Redis takes it: what is raised here comes out of a signal handler, and ends what is in flight."""
        with contextlib.suppress(redis.RedisError):
            super().set_shutdown_requested_date()  # type: ignore[no-untyped-call]

    def _start_scheduler(self, *args: Any, **kwargs: Any) -> None:
        """Starts none."""


class PumpWorker(HubWorker):
    """A worker that always has a pump to run, and tells it when to stop.

    Whatever happens to the jobs in Redis, a worker that finds its queue empty puts a pump there.
    """

    stopping = False

    def work(self, *args: Any, **kwargs: Any) -> bool:
        """As RQ's. While Redis refuses to be written to (it is full, or cannot write to its disk) a pump runs all the
        same, and then the process ends: its pool makes another one, which tries again.
        """
        try:
            return super().work(*args, **kwargs)
        except redis.ResponseError as error:
            logger.error("Redis refuses what RQ writes, and a pump runs without it: %s", error)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.handle_warm_shutdown_request())
        if not self._stop_requested:
            run_pump()
        return True

    def before_dequeue(self) -> None:
        """Sees to it that there is a pump to run."""
        queue_pump()

    def handle_warm_shutdown_request(self) -> None:
        """Lets the pump that runs in this process come to its end."""
        PumpWorker.stopping = True
        super().handle_warm_shutdown_request()

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:
        """Nothing: pool and terminal both send a signal, and the pump ends soon enough by itself."""


@functools.cache
def _claimers() -> list[Claimer]:
    """Those of all pumps of this process, one after the other."""
    return make_claimers()


def queue_pump() -> None:
    """Puts a pump into the queue, unless one is there. Raises RedisError where Redis is away or full."""
    queue = django_rq.get_queue(settings.PUMP_QUEUE)  # a worker's own queues know nothing of our serializer
    if not queue.count:
        queue.enqueue(run_pump, result_ttl=RESULT_SECONDS, failure_ttl=FAILURE_SECONDS)


def run_pump() -> None:
    """Runs a pump for `PUMP_SECONDS`, or until its worker is told to stop, and queues the next.

    While Redis is away or full the worker could not get another one: this job goes on.
    """
    raise_descriptor_limit()
    while not PumpWorker.stopping:
        try:
            _run_one_pump()
        except Exception:
            time.sleep(FAULT_SECONDS)
            raise
        try:
            queue_pump()
            return
        except redis.RedisError as error:
            logger.warning("no pump can be queued, this worker goes on without: %s", error)


def _run_one_pump() -> None:
    """It outlives its time while Redis is away, and while the database is: it could not record what it has in hand."""
    end = time.monotonic() + settings.PUMP_SECONDS
    pump = Pump(claimers=_claimers())
    pump.run(lambda: PumpWorker.stopping or (time.monotonic() >= end and pump.hears_wake_ups and pump.reaches_database))


def run_replay_jobs() -> None:
    """Moves every open replay job on by as many deliveries as its rate allows since the last time."""
    for job in ReplayJob.objects.filter(state__in=[ReplayJob.State.QUEUED, ReplayJob.State.RUNNING]).order_by("id"):
        step_replay_job(job.pk, job.rate * REPLAY_SECONDS)


def release_held() -> None:
    """Lets go what was left on hold by a race with a resume."""
    if count := release_stranded():
        logger.warning("%d deliveries were on hold for endpoints that are active; they are due", count)


def repair_gaps() -> None:
    """Sends events on that fit their type's limits since these were changed."""
    if count := repair_projection_gaps():
        logger.warning("%d projection gaps are repaired", count)


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
        self.register(release_held, settings.JOBS_QUEUE, interval=60)
        self.register(repair_gaps, settings.JOBS_QUEUE, interval=10)
        self.register(clear_sessions, settings.JOBS_QUEUE, interval=86_400)

    def enqueue_jobs(self) -> list[CronJob]:
        """Queues what is due."""
        queue = django_rq.get_queue(settings.JOBS_QUEUE)
        queued = []
        for job in self.get_jobs():
            if job.func and job.should_run() and not queue.count:
                queue.enqueue(job.func, result_ttl=RESULT_SECONDS, failure_ttl=FAILURE_SECONDS)
                job.set_enqueue_time(now())
                queued.append(job)
        return queued

    def calculate_sleep_interval(self) -> float:
        """Seconds until it looks again. RQ's own number is none at all while a job waits that is not queued again, and
        a minute where no job has been queued yet.
        """
        return min(max(super().calculate_sleep_interval(), CLOCK_SECONDS), REPLAY_SECONDS)

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
