"""The whole product, as processes on servers of its own, while its parts are killed, emptied, filled and cut off."""

import random
import shutil

import pytest
from django.conf import settings

from bench import chaos
from webhookhub.ids import typeid

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def after():
    """After all faults, each done once: what was found of each, and the rest of what is to be seen, by name."""
    random.seed(7)
    folder = settings.VAR_DIR / "chaos"
    shutil.rmtree(folder, ignore_errors=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        chaos.Witness() as witness,
        chaos.Product(folder, witness.url) as product,
    ):
        patch.setattr(chaos, "PER_SECOND", 100)
        patch.setattr(chaos, "AWAY_SECONDS", 5)
        posts = [chaos.inflict(product, name, 1) for name in chaos.FAULTS]
        product.settle()
        seen = {one.prefix: chaos.find(product, witness, one, 1) for one in posts}
        seen["jobs run"] = product.jobs_run()
        seen["strangers"] = witness.counts.keys() - {
            typeid("evt", key) for (key,) in product.query("SELECT id FROM deliveries_event")
        }
    return seen


def check(finding):
    assert finding.accepted > 0
    assert (finding.lost, finding.belied, finding.stuck) == (0, 0, 0), finding
    # Only who is killed takes with it what it had sent and not recorded.
    assert finding.duplicates <= (settings.PUMP_IN_FLIGHT if finding.name == "worker-killed" else 0), finding


@pytest.mark.parametrize("name", chaos.FAULTS)
def test_nothing_that_was_accepted_is_lost_and_nothing_is_left_behind(after, name):
    check(after[name])


def test_what_comes_again_comes_under_the_same_id(after):
    assert after["strangers"] == set()


def test_periodic_jobs_run_on(after):
    assert after["jobs run"]


def test_a_full_disk_loses_nothing_and_nothing_is_sent_twice(monkeypatch):
    monkeypatch.setattr(chaos, "PER_SECOND", 100)
    monkeypatch.setattr(chaos, "AWAY_SECONDS", 5)
    folder = settings.VAR_DIR / "chaos-full"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with (
            chaos.small_disk(folder / "disk") as disk,
            chaos.Witness() as witness,
            chaos.Product(folder, witness.url, disk) as product,
        ):
            posts = chaos.inflict(product, chaos.DISK_FULL, 1)
            product.settle()
            finding = chaos.find(product, witness, posts, 1)
    except PermissionError as error:
        pytest.skip(str(error))
    assert finding.refused > 0
    check(finding)
