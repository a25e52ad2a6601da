"""Replays in bulk, and the periodic jobs that carry them on."""

import json

import django_rq
import psycopg
import pytest
import redis
from django.conf import settings
from django.db import connection

from deliveries.jobs import Clock, HubWorker, release_held, run_replay_jobs
from deliveries.models import Delivery, ReplayJob
from deliveries.publishing import NewEvent, publish_events
from deliveries.replays import NotReplayable, cancel_replay_job, create_replay_job, replay_delivery, step_replay_job
from deliveries.services import delete_endpoint, pause_endpoints, release_stranded, resume_endpoints
from endpoints.models import AuditEvent, Endpoint
from endpoints.services import SYSTEM

pytestmark = pytest.mark.django_db


@pytest.fixture
def dead(tenant, endpoint):
    """Makes dead deliveries of the endpoint."""

    def make(count):
        publish_events([NewEvent(tenant.pk, "a", b"{}") for _ in range(count)])
        Delivery.objects.filter(state="pending").update(state="dead")

    return make


def make_job(endpoint, **fields):
    return create_replay_job(job=ReplayJob(endpoint=endpoint, states=["dead"], reason="outage", **fields), actor=SYSTEM)


def test_a_job_queues_every_delivery_that_matched_once_and_ends(endpoint, dead):
    dead(25)
    job = make_job(endpoint)
    assert job.matched == 25
    assert [step_replay_job(job.pk, 10) for _ in range(4)] == [10, 10, 5, None]
    job.refresh_from_db()
    assert (job.state, job.queued) == ("completed", 25)
    replays = Delivery.objects.filter(replay_job=job)
    assert {one.replay_of_id for one in replays} == set(
        Delivery.objects.filter(state="dead").values_list("pk", flat=True)
    )
    assert {(one.state, one.trigger) for one in replays} == {("pending", "replay")}


def test_the_filter_is_frozen_when_the_job_is_made(endpoint, dead):
    dead(3)
    job = make_job(endpoint)
    dead(4)
    step_replay_job(job.pk, 100)
    assert Delivery.objects.filter(replay_job=job).count() == 3


def test_a_window_and_the_states_bound_what_matches(endpoint, dead):
    dead(3)
    middle = Delivery.objects.order_by("id")[1].created_at
    Delivery.objects.filter(pk=Delivery.objects.order_by("id").last().pk).update(state="delivered")
    assert make_job(endpoint).matched == 2
    assert make_job(endpoint, created_before=middle).matched == 0
    assert make_job(endpoint, created_after=middle).matched == 2


def test_a_cancelled_job_queues_no_more(endpoint, dead):
    dead(20)
    job = make_job(endpoint)
    step_replay_job(job.pk, 5)
    assert cancel_replay_job(job=job, actor=SYSTEM)
    assert step_replay_job(job.pk, 5) is None
    assert not cancel_replay_job(job=job, actor=SYSTEM)
    assert Delivery.objects.filter(replay_job=job).count() == 5


def test_replays_for_an_endpoint_that_is_not_active_are_held(endpoint, dead):
    dead(2)
    pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="maintenance")
    job = make_job(endpoint)
    step_replay_job(job.pk, 5)
    assert {one.state for one in Delivery.objects.filter(replay_job=job)} == {"held"}


def test_the_periodic_job_moves_open_jobs_by_their_rate(endpoint, dead):
    dead(30)
    job = make_job(endpoint, rate=5)
    run_replay_jobs()
    assert Delivery.objects.filter(replay_job=job).count() == 10  # two seconds' worth
    run_replay_jobs()
    run_replay_jobs()
    run_replay_jobs()
    job.refresh_from_db()
    assert (job.state, job.queued) == ("completed", 30)


def test_resuming_makes_what_is_held_due_and_leaves_the_rest(tenant, endpoint):
    pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="maintenance")
    publish_events([NewEvent(tenant.pk, "a", b"{}") for _ in range(3)])
    Delivery.objects.filter(pk=Delivery.objects.first().pk).update(state="dead")
    assert resume_endpoints(Endpoint.objects.all(), actor=SYSTEM) == 1
    assert resume_endpoints(Endpoint.objects.all(), actor=SYSTEM) == 0
    assert Delivery.objects.filter(state="pending").count() == 2
    actions = list(AuditEvent.objects.order_by("id").values_list("action", flat=True))
    assert actions == ["endpoint.create", "endpoint.paused", "endpoint.active"]


def test_what_a_race_with_a_resume_left_on_hold_is_let_go(tenant, endpoint, make_endpoint):
    paused = make_endpoint(name="paused")
    pause_endpoints(Endpoint.objects.filter(pk=paused.pk), actor=SYSTEM, reason="maintenance")
    publish_events([NewEvent(tenant.pk, "a", b"{}")])
    Delivery.objects.update(state="held")
    release_held()
    assert Delivery.objects.in_hand().get().endpoint == endpoint
    assert Delivery.objects.get(endpoint=paused).state == "held"


@pytest.mark.django_db(transaction=True)
def test_pausing_waits_for_nothing_that_a_pump_has_in_hand(tenant, endpoint):
    publish_events([NewEvent(tenant.pk, "a", b"{}") for _ in range(3)])
    first = Delivery.objects.order_by("id").first()
    with psycopg.connect(connection.connection.info.dsn) as pump:
        pump.execute("SELECT 1 FROM deliveries_delivery WHERE id = %s FOR UPDATE", [first.pk])
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '2s'")
        assert pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="maintenance") == 1
    assert Delivery.objects.get(pk=first.pk).state == "pending"
    assert Delivery.objects.filter(state="held").count() == 2


@pytest.mark.django_db(transaction=True)
def test_the_clock_queues_jobs_as_json_and_does_not_pile_them_up():
    valkey = redis.Redis.from_url(settings.REDIS_URL)
    valkey.flushall()
    valkey.close()
    clock = Clock()
    queue = django_rq.get_queue(settings.JOBS_QUEUE)
    clock.enqueue_jobs()
    assert [job.func_name for job in queue.jobs] == ["deliveries.jobs.run_replay_jobs"]
    assert json.loads(queue.jobs[0].data)[0] == "deliveries.jobs.run_replay_jobs"
    clock.enqueue_jobs()
    assert queue.count == 1
    queue.empty()
    clock.enqueue_jobs()
    assert [job.func_name for job in queue.jobs] == ["deliveries.jobs.release_held"]
    assert queue.jobs[0].result_ttl == 60
    queue.empty()
    clock.enqueue_jobs()
    assert [job.func_name for job in queue.jobs] == ["deliveries.jobs.repair_gaps"]
    queue.empty()
    clock.enqueue_jobs()
    assert [job.func_name for job in queue.jobs] == ["deliveries.jobs.clear_sessions"]
    queue.empty()


@pytest.mark.django_db(transaction=True)
def test_periodic_jobs_run_on_after_their_connection_to_the_database_was_cut():
    queue = django_rq.get_queue(settings.JOBS_QUEUE)
    worker = HubWorker([queue], connection=queue.connection, serializer=queue.serializer)
    connection.ensure_connection()
    with psycopg.connect(settings.DATABASE_URL, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])
    job = queue.enqueue(release_held)
    worker.execute_job(job, queue)
    assert job.is_finished
    queue.empty()


@pytest.mark.django_db
def test_what_is_on_hold_is_not_sent_twice_by_a_replay(tenant, endpoint):
    pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="x")
    publish_events([NewEvent(tenant.pk, "a", b"{}")])
    with pytest.raises(NotReplayable, match="needs no replay"):
        replay_delivery(delivery=Delivery.objects.get(), actor=SYSTEM)


@pytest.mark.django_db
def test_what_a_race_has_left_for_a_deleted_endpoint_is_ended_by_the_periodic_job(tenant, endpoint):
    publish_events([NewEvent(tenant.pk, "a", b"{}") for _ in range(2)])
    delete_endpoint(endpoint=endpoint, actor=SYSTEM)
    first, second = Delivery.objects.all()
    Delivery.objects.filter(pk=first.pk).update(state="held", outcome="", last_error="")
    Delivery.objects.filter(pk=second.pk).update(state="pending", outcome="", last_error="")
    release_stranded()
    assert set(Delivery.objects.values_list("state", "outcome", "last_error")) == {("dead", "dead", "endpoint_deleted")}
    job = ReplayJob(endpoint=endpoint, states=["dead"], reason="x")
    assert step_replay_job(create_replay_job(job=job, actor=SYSTEM).pk, 10) == 0
    assert ReplayJob.objects.get().state == "completed"


@pytest.mark.django_db
def test_what_came_under_a_contract_that_is_gone_follows_the_endpoint_s_next_one(tenant, endpoint, monkeypatch):
    Endpoint.objects.update(contract="patient")
    publish_events([NewEvent(tenant.pk, "a", b"{}")])
    Delivery.objects.update(state="held")
    assert release_stranded() == 0
    Endpoint.objects.update(contract="brief")
    assert release_stranded() == 1
    assert Delivery.objects.get().contract.startswith("brief@")
