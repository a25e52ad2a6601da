"""What tests share: tenants and endpoints, a receiver on loopback, a pump that runs until the queue is quiet."""

import asyncio
import dataclasses
import socket
import time
from collections.abc import Callable

import hypothesis
import pytest
import redis
from django.conf import settings

from deliveries import intake
from deliveries.models import Delivery
from deliveries.pump import Pump
from endpoints import services
from endpoints.contracts import CONTRACTS
from endpoints.models import ApiKey, Endpoint, Tenant
from endpoints.services import SYSTEM, create_api_key, create_endpoint
from tests.clock import Clock
from tests.product import Product
from tests.receiver import Receiver

# How long an example takes says nothing on a machine that is shared.
hypothesis.settings.register_profile("hub", deadline=None)
hypothesis.settings.load_profile("hub")


@pytest.fixture(autouse=True)
def _only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of ours connects to, or looks up, anything but this machine."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple):
            assert address[0].startswith("127.") or address[0] in {"::1", "localhost"}, f"a test dials {address}"
        connect(self, address)  # type: ignore[arg-type]

    def guarded_look_up(host: object, *args: object, **kwargs: object) -> object:
        assert host in {None, "", "localhost", "127.0.0.1", "::1", b"localhost", b"127.0.0.1"}, (
            f"a test looks up {host!r}"
        )
        return look_up(host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)


@pytest.fixture(autouse=True)
def _forget_contracts() -> None:
    """What this process remembers of rows that another test's database held."""
    services._stored.clear()
    services._earlier_contract.cache_clear()


@pytest.fixture
def receiver():
    """A receiver on loopback that answers 200 unless told otherwise."""
    with Receiver() as server:
        yield server


@pytest.fixture
def tenant(db) -> Tenant:
    """A tenant."""
    return Tenant.objects.create(name="Acme")


@pytest.fixture
def api_key(tenant: Tenant) -> str:
    """An API key of the tenant, as text."""
    return create_api_key(key=ApiKey(tenant=tenant, name="program"), actor=SYSTEM)


@pytest.fixture
def make_endpoint(tenant: Tenant, receiver: Receiver) -> Callable[..., Endpoint]:
    """Makes endpoints of the tenant, at the receiver unless a URL is given; `secret` holds the signing secret."""

    def make(**fields: object) -> Endpoint:
        endpoint = Endpoint(**{"tenant": tenant, "name": "orders", "url": receiver.url, **fields})
        endpoint.secret = create_endpoint(endpoint=endpoint, actor=SYSTEM)
        return endpoint

    return make


@pytest.fixture
def endpoint(make_endpoint: Callable[..., Endpoint]) -> Endpoint:
    """An endpoint of the tenant at the receiver, for all types."""
    return make_endpoint()


@pytest.fixture
def clock(db, monkeypatch):
    """A clock that the test sets, for the hub and for its database."""
    one = Clock(monkeypatch)
    yield one
    one.close()


@pytest.fixture
def contract(monkeypatch) -> Callable[..., None]:
    """Changes a contract for a test."""

    def change(name: str = "standard", **fields: object) -> None:
        monkeypatch.setitem(CONTRACTS, name, dataclasses.replace(CONTRACTS[name], **fields))

    return change


@pytest.fixture
def endpoint_under(make_endpoint: Callable[..., Endpoint], monkeypatch) -> Callable[..., Endpoint]:
    """Makes an active endpoint under a contract; betterstood's may have a URL on loopback here."""

    def make(name: str, **fields: object) -> Endpoint:
        loopback = dataclasses.replace(CONTRACTS["betterstood"], https_443=False)
        monkeypatch.setitem(CONTRACTS, "betterstood", loopback)
        endpoint = make_endpoint(contract=name, **fields)
        Endpoint.objects.filter(pk=endpoint.pk).update(status="active")
        return endpoint

    return make


@pytest.fixture
def product(db):
    """The product, nothing of it started."""
    valkey = redis.Redis.from_url(settings.REDIS_URL)
    valkey.flushall()
    valkey.close()
    running = Product()
    yield running
    running.close()


@pytest.fixture
def pump(db) -> Callable[[], None]:
    """Runs a pump until no delivery is due or in flight, for 20 seconds at most."""

    def run(seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        one = Pump()

        def is_quiet() -> bool:
            return time.monotonic() > end or not Delivery.objects.in_hand().exists()

        one.run(is_quiet)

    return run


@pytest.fixture
def groups(monkeypatch) -> list[int]:
    """How many events each commit of the fast lane had; the first one waits half a second for others to join."""
    sizes: list[int] = []
    all_wait = time.monotonic() + 0.5
    publish = intake.apublish_plain

    async def publish_when_all_wait(events, database):
        await asyncio.sleep(all_wait - time.monotonic())
        sizes.append(len(events))
        return await publish(events, database)

    monkeypatch.setattr(intake, "PATIENCE_SECONDS", 5.0)
    monkeypatch.setattr(intake, "apublish_plain", publish_when_all_wait)
    return sizes
