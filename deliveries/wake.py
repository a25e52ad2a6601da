"""Wake-ups over Redis: "something is due". They carry no state, and losing one costs a quarter of a second."""

import asyncio
import functools
import logging
import time
from typing import Any

import redis
import redis.asyncio
from django.conf import settings

CHANNEL = "webhookhub:wake"
RETRY_SECONDS = 1.0  # after an error Redis is left alone for this long
APART_SECONDS = 0.010  # between two wake-ups from one event loop: a pump gathers for as long before it claims again
_BRIEFLY: dict[str, Any] = {"socket_timeout": 0.2, "socket_connect_timeout": 0.2, "retry": None}  # seconds
_NOT_SENT = "no wake-up sent, pumps find the work by polling: %s"

logger = logging.getLogger(__name__)


class Announcer:
    """Tells the pumps that something is due. Never raises, and waits for Redis a fifth of a second at most."""

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url, **_BRIEFLY)
        self._quiet_until = 0.0

    def announce(self) -> None:
        """Wakes every pump that listens."""
        if time.monotonic() < self._quiet_until:
            return
        try:
            self._redis.publish(CHANNEL, b"")
        except redis.RedisError as error:
            self._quiet_until = time.monotonic() + RETRY_SECONDS
            logger.warning(_NOT_SENT, error)


@functools.cache
def _announcer(url: str) -> Announcer:
    return Announcer(url)


def announce() -> None:
    """Wakes every pump. Call it after commit."""
    _announcer(settings.REDIS_URL).announce()


class LoopAnnouncer:
    """`Announcer` for an event loop, which never waits for it; calls that come close together are one wake-up."""

    def __init__(self, url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(url, **_BRIEFLY)
        self._is_wanted = False
        self._task: asyncio.Task[None] | None = None

    def announce(self) -> None:
        """Wakes every pump in a moment."""
        self._is_wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._is_wanted:
            self._is_wanted = False
            pause = APART_SECONDS
            try:
                await self._redis.publish(CHANNEL, b"")
            except redis.RedisError as error:
                pause = RETRY_SECONDS
                logger.warning(_NOT_SENT, error)
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Ends, when the announcement that is being made is out."""
        self._is_wanted = False
        if self._task is not None:
            await self._task
        await self._redis.aclose()


class Listener:
    """Hears wake-ups. `fd` is the descriptor that becomes readable when one comes, or None while Redis is away."""

    def __init__(self, url: str) -> None:
        self._pubsub = redis.Redis.from_url(url, socket_connect_timeout=0.2, retry=None).pubsub(
            ignore_subscribe_messages=True
        )
        self._retry_at = 0.0
        self.fd: int | None = None
        self.reconnect()

    def reconnect(self) -> bool:
        """Tries to subscribe again when Redis was away. True when `fd` is a new one."""
        if self.fd is not None or time.monotonic() < self._retry_at:
            return False
        try:
            self._pubsub.reset()
            self._pubsub.subscribe(CHANNEL)
            assert self._pubsub.connection is not None
            self.fd = self._pubsub.connection._sock.fileno()
        except redis.RedisError:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        return True

    def drain(self) -> None:
        """Takes the wake-ups that have come."""
        try:
            while self._pubsub.get_message(timeout=0) is not None:
                pass
        except redis.RedisError:
            self.fd = None

    def close(self) -> None:
        """Ends the subscription."""
        self._pubsub.close()
