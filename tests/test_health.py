"""`GET /healthz` and `GET /readyz`: what load balancers and monitoring are told."""

from datetime import timedelta

import pytest
import redis
import requests
from django.conf import settings as django_settings
from django.db import OperationalError, connection
from django.db.migrations.recorder import MigrationRecorder
from django.db.models.functions import Now
from django.test import Client, override_settings

from deliveries.models import Delivery
from deliveries.querysets import LATENESS
from endpoints.models import Endpoint, Tenant
from tests.test_cases import publish
from webhookhub import embedded
from webhookhub.database import PUMP_NAME, name_session, run_by_index

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def pump_session(db):
    """This connection, named as a pump's."""
    name_session(PUMP_NAME)
    yield
    name_session("test")


@pytest.fixture
def late(tenant, endpoint) -> None:
    """A delivery that has been due for a quarter of an hour."""
    publish(tenant)
    Delivery.objects.update(due_at=Now() - timedelta(minutes=15))


def ready(status: int = 200) -> dict:
    response = Client().get("/readyz")
    assert response.status_code == status, response.content
    assert (response.headers["Content-Type"], response.headers["Cache-Control"]) == ("application/json", "no-store")
    return response.json()


def test_all_is_well_while_a_pump_runs_and_nothing_is_late(pump_session):
    found = ready()
    assert 0 <= found["pumps"].pop("last_seconds") < 5
    assert found == {
        "status": "ok",
        "database": "ok",
        "redis": "ok",
        "oldest_due_seconds": 0.0,
        "pumps": {"count": 1},
    }


def test_who_asks_by_an_address_and_without_https_is_answered(pump_session, settings):
    settings.SECURE_SSL_REDIRECT = True
    for path in ("/healthz", "/readyz"):
        answered = Client(headers={"Host": "10.1.2.3:8000"}).get(path)
        assert (answered.status_code, answered.json()["status"]) == (200, "ok")
        assert Client().head(path).status_code == 200
        assert Client().post(path).status_code != 200


def test_healthz_asks_nobody_anything(django_assert_num_queries, settings):
    settings.REDIS_URL = "unix:///nowhere/valkey.sock"
    with django_assert_num_queries(0):
        assert Client().get("/healthz").json() == {"status": "ok"}


def test_without_a_pump_it_is_degraded(db):
    name_session("test")
    found = ready()
    assert (found["status"], found["pumps"]) == ("degraded", {"count": 0, "last_seconds": None})


def test_without_redis_it_is_degraded(pump_session, settings):
    settings.REDIS_URL = "unix:///nowhere/valkey.sock"
    found = ready()
    assert (found["status"], found["redis"], found["database"]) == ("degraded", "away", "ok")


@override_settings(READY_MAX_LATE_SECONDS=600)
def test_what_is_overdue_by_more_than_the_setting_makes_it_unavailable(pump_session, late):
    found = ready(503)
    assert found["status"] == "unavailable"
    assert 900 <= found["oldest_due_seconds"] < 960


@override_settings(READY_MAX_LATE_SECONDS=1_200)
def test_what_is_overdue_by_less_is_told(pump_session, late):
    found = ready()
    assert (found["status"], found["oldest_due_seconds"] >= 900) == ("ok", True)


@pytest.mark.parametrize(
    "reason",
    [{"rate_limit": 1.0}, {"max_in_flight": 1}, {"ordered": True}, {"probe_at": Now()}, {"failures_in_a_row": 10}],
    ids=lambda reason: next(iter(reason)),
)
def test_what_waits_because_of_its_endpoint_does_not_count(pump_session, late, reason):
    """Or one receiver that hangs would take the hub out of its load balancer."""
    Endpoint.objects.update(**reason)
    assert ready()["oldest_due_seconds"] == 0


def test_nor_does_what_waits_for_an_endpoint_or_a_tenant_that_is_off(pump_session, late):
    Endpoint.objects.update(status="paused")
    assert ready()["oldest_due_seconds"] == 0
    Endpoint.objects.update(status="active")
    Tenant.objects.update(webhooks_enabled=False)
    assert ready()["oldest_due_seconds"] == 0


def test_without_the_database_it_is_unavailable_and_says_nothing_of_it(monkeypatch):
    def fail(*_, **__):
        raise OperationalError('connection to "secret-host" failed: password=hunter2')

    monkeypatch.setattr("deliveries.querysets.run_by_index", fail)
    assert ready(503) == {"status": "unavailable", "database": "away", "redis": "ok"}


def test_with_migrations_to_be_applied_it_is_unavailable(pump_session):
    newest = MigrationRecorder(connection).migration_qs.filter(app="deliveries").order_by("-id").first()
    newest.delete()
    try:
        assert ready(503)["database"] == "migrations are not applied"
    finally:
        newest.save(force_insert=True)
    assert ready()["status"] == "ok"


def test_a_question_costs_few_queries_and_looks_at_few_rows(pump_session, django_assert_max_num_queries):
    with django_assert_max_num_queries(6):
        ready()
    rows = run_by_index("default", f"EXPLAIN {LATENESS}", {"limit": 2_000, "failures": 10})
    plan = "\n".join(row[0] for row in rows)
    assert "using delivery_due_by_priority on" in plan
    assert "Sort" not in plan


def test_a_redis_that_may_forget_or_is_full_is_told(pump_session, settings, tmp_path):
    with embedded._valkey(tmp_path) as url:
        settings.REDIS_URL = url
        with redis.Redis.from_url(url) as own:
            assert ready()["redis"] == "ok"
            own.config_set("maxmemory-policy", "allkeys-lru")
            assert ready()["redis"] == "maxmemory-policy is not noeviction"
            own.config_set("maxmemory-policy", "noeviction")
            own.config_set("maxmemory", "100kb")
            found = ready()
            assert (found["status"], found["redis"]) == ("degraded", "full")


def test_the_default_is_five_minutes():
    assert django_settings.READY_MAX_LATE_SECONDS == 300


@pytest.mark.live
def test_a_web_process_without_a_database_is_up_and_not_ready(product):
    product.environment["DATABASE_URL"] = "postgresql://nobody@127.0.0.1:1/none"
    product.start_web()
    assert requests.get(f"{product.url}/healthz", timeout=5).json() == {"status": "ok"}
    found = requests.get(f"{product.url}/readyz", timeout=5)
    assert (found.status_code, found.json()["database"]) == (503, "away")
    assert "nobody" not in found.text
