"""What is done with tenants, keys, endpoints and secrets. Admin, API and commands all call these."""

import functools
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import msgspec
from django.conf import settings
from django.db import models, transaction
from django.db.models.functions import Least, Now
from django.http import HttpRequest

from endpoints import contracts, encryption, signing
from endpoints.catalogues import CATALOGUES
from endpoints.models import ApiKey, AuditEvent, ContractVersion, Endpoint, EndpointSecret, EventType, Record, Tenant
from webhookhub.ids import parse_typeid


@dataclass(frozen=True, slots=True)
class Actor:
    """Who does something: a user, a key or the system, and from where."""

    kind: str
    name: str
    address: str | None = None

    @classmethod
    def of_request(cls, request: HttpRequest) -> Self:
        """The person who is logged in."""
        return cls(AuditEvent.Actor.USER, request.user.get_username(), request.META.get("REMOTE_ADDR"))


SYSTEM = Actor(AuditEvent.Actor.SYSTEM, "webhookhub")


def record_audit(
    *,
    actor: Actor,
    action: str,
    of: Record,
    tenant: Tenant | None,
    reason: str = "",
    changes: dict[str, Any] | None = None,
) -> None:
    """Adds a line to the audit. `changes` must hold no secret."""
    AuditEvent.objects.create(
        actor_kind=actor.kind,
        actor=actor.name,
        address=actor.address,
        action=action,
        tenant=tenant,
        object_id=of.typeid,
        object_name=str(of)[:200],
        reason=reason,
        changes=changes or {},
    )


# --- API keys


def _digest(secret: str) -> bytes:
    return hmac.digest(settings.API_KEY_PEPPER, secret.encode(), hashlib.sha256)


def create_api_key(*, key: ApiKey, actor: Actor) -> str:
    """Stores a new key and returns its text, `whk_<id>.<secret>`. This is the only time it can be had."""
    secret = secrets.token_urlsafe(32)
    key.digest = _digest(secret)
    with transaction.atomic():
        key.save(force_insert=True)
        record_audit(actor=actor, action="api_key.create", of=key, tenant=key.tenant)
    return f"{key.typeid}.{secret}"


def revoke_api_key(*, key: ApiKey, actor: Actor, reason: str = "") -> bool:
    """Makes a key useless for good. False when it already was."""
    with transaction.atomic():
        done = ApiKey.objects.filter(pk=key.pk, revoked_at__isnull=True).update(revoked_at=Now())
        if done:
            record_audit(actor=actor, action="api_key.revoke", of=key, tenant=key.tenant, reason=reason)
    return bool(done)


def authenticate(text: str) -> ApiKey | None:
    """The usable key that this text is, or None. A key that does not exist takes the same work as one that does."""
    head, _, secret = text.partition(".")
    digest = _digest(secret)
    try:
        key = ApiKey.objects.usable().get(pk=parse_typeid(ApiKey.prefix, head))
    except (ValueError, ApiKey.DoesNotExist):
        return None
    return key if hmac.compare_digest(bytes(key.digest), digest) else None


# --- Endpoints and their secrets


def create_endpoint(*, endpoint: Endpoint, actor: Actor, secret: str | None = None) -> str:
    """Stores a new endpoint with one signing secret (generated unless given) and returns the secret.

    Under a contract with a challenge it is not verified yet, and the types of the contract's catalogue become the
    tenant's. Raises ValidationError (URL, event types) or signing.SecretError; then nothing is stored.
    """
    endpoint.full_clean()
    contract = contracts.CONTRACTS[endpoint.contract]
    if contract.challenge:
        endpoint.status = Endpoint.Status.UNVERIFIED
    scheme = signing.SCHEMES[contract.signature]
    secret = secret or scheme.generate_secret()
    scheme.parse_secret(secret)
    with transaction.atomic():
        _add_catalogue(endpoint.tenant, contract.catalogue)
        endpoint.save(force_insert=True)
        _add_secret(endpoint, secret)
        record_audit(
            actor=actor, action="endpoint.create", of=endpoint, tenant=endpoint.tenant, changes={"url": endpoint.url}
        )
    return secret


def update_endpoint(*, endpoint: Endpoint, fields: list[str], actor: Actor) -> None:
    """Stores these changed fields of an endpoint. Raises ValidationError; then nothing is stored."""
    endpoint.full_clean()
    if not fields:
        return
    before = Endpoint.objects.values(*fields).get(pk=endpoint.pk)
    changes = {
        name: [before[name], getattr(endpoint, name)] for name in fields if before[name] != getattr(endpoint, name)
    }
    with transaction.atomic():
        endpoint.save(update_fields=fields)
        record_audit(actor=actor, action="endpoint.change", of=endpoint, tenant=endpoint.tenant, changes=changes)


def _add_catalogue(tenant: Tenant, catalogue: str) -> None:
    """Gives a tenant the types of a catalogue. What it has of them keeps its description and schema."""
    kinds = CATALOGUES.get(catalogue, ())
    EventType.objects.bulk_create(
        [
            EventType(
                tenant=tenant,
                name=kind.name,
                description=kind.description,
                mode=kind.mode,
                lifecycle_sequence=kind.sequence,
                schema=kind.schema,
            )
            for kind in kinds
        ],
        update_conflicts=True,
        unique_fields=["tenant", "name"],
        update_fields=["mode", "lifecycle_sequence"],
    )


def rotate_secret(*, endpoint: Endpoint, actor: Actor, overlap: timedelta, reason: str = "") -> str:
    """Adds a new signing secret and returns it; the ones before sign along for `overlap` and not after."""
    secret = _scheme_of(endpoint).generate_secret()
    with transaction.atomic():
        # One that had less time left keeps that: it may be the one that leaked.
        valid = EndpointSecret.objects.valid().filter(endpoint=endpoint)
        valid.update(expires_at=Least(models.F("expires_at"), Now() + overlap))
        _add_secret(endpoint, secret)
        record_audit(
            actor=actor,
            action="endpoint.rotate_secret",
            of=endpoint,
            tenant=endpoint.tenant,
            reason=reason,
            changes={"overlap_seconds": int(overlap.total_seconds())},
        )
    return secret


def _scheme_of(endpoint: Endpoint) -> signing.Scheme:
    return signing.SCHEMES[contracts.CONTRACTS[endpoint.contract].signature]


def _add_secret(endpoint: Endpoint, secret: str) -> None:
    EndpointSecret.objects.create(endpoint=endpoint, sealed=encryption.seal(secret, settings.ENCRYPTION_KEYS))


def signing_keys(sealed: Sequence[bytes], scheme: str) -> list[signing.Key]:
    """The keys of an endpoint's encrypted secrets for a signature scheme; none when one of them cannot be had.

    Nothing may be sent then: a receiver would see a request that is signed by less than it was promised.
    """
    try:
        return [_signing_key(one, scheme) for one in sealed]
    except (encryption.Unreadable, signing.SecretError):
        return []


@functools.lru_cache(maxsize=10_000)  # a pump opens the same few secrets for every request it signs
def _signing_key(sealed: bytes, scheme: str) -> signing.Key:
    return signing.SCHEMES[scheme].parse_secret(encryption.unseal(sealed, settings.ENCRYPTION_KEYS))


def verifying_secrets(endpoint: Endpoint) -> list[str]:
    """What the endpoint's receiver verifies with now: its secrets as text, of a `whsk_` pair the public half.

    Raises encryption.Unreadable, or signing.SecretError for one that its contract's scheme cannot use.
    """
    scheme = _scheme_of(endpoint)
    sealed = EndpointSecret.objects.valid().filter(endpoint=endpoint).values_list("sealed", flat=True)
    secrets = [encryption.unseal(bytes(one), settings.ENCRYPTION_KEYS) for one in sealed]
    keys = [scheme.parse_secret(secret) for secret in secrets]
    return [
        key.public_secret if isinstance(key, signing.Ed25519Key) else secret
        for key, secret in zip(keys, secrets, strict=True)
    ]


# --- Contracts

_stored: set[str] = set()  # keys whose rows this process knows to be there


def contract_keys() -> dict[str, str]:
    """The key of every contract that an endpoint may follow, by name; new ones are kept for who needs them later."""
    return dict(zip(contracts.CONTRACTS, keep_contracts(list(contracts.CONTRACTS.values())), strict=True))


def keep_contracts(given: Sequence[contracts.Contract]) -> list[str]:
    """The keys of these contracts, whose definitions are kept for whoever meets a delivery under one of them."""
    keys = [_key_of(contract) for contract in given]
    if missing := set(keys) - _stored:
        versions = [
            ContractVersion(key=key, definition=contracts.definition(one))
            for key, one in zip(keys, given, strict=True)
            if key in missing
        ]
        ContractVersion.objects.bulk_create(versions, ignore_conflicts=True)
        transaction.on_commit(lambda: _stored.update(missing))
    return keys


def contract_of(key: str) -> contracts.Contract | None:
    """The contract of a key: that of the name as it was when the key was given. None when nobody knows it any more.

    A name alone is the contract that has the name now.
    """
    name, _, fingerprint = key.partition("@")
    current = contracts.CONTRACTS.get(name)
    if current and (not fingerprint or _key_of(current) == key):
        return current
    try:
        return _earlier_contract(key)
    except (ContractVersion.DoesNotExist, msgspec.ValidationError):
        return None


def name_in(key: str) -> str:
    """The name of a key's contract, or of the one that a contract of the hub's own messages is made from."""
    return key.partition("@")[0].partition("/")[0]


_keys: dict[str, tuple[contracts.Contract, str]] = {}


def _key_of(contract: contracts.Contract) -> str:
    """The contract's key, without comparing all of it with what was asked before: this is asked for every request."""
    contract_then, key = _keys.get(contract.name, (None, ""))
    if contract_then is not contract:
        key = contracts.key_of(contract)
        _keys[contract.name] = (contract, key)
    return key


@functools.lru_cache(maxsize=1_000)
def _earlier_contract(key: str) -> contracts.Contract:
    return contracts.from_definition(ContractVersion.objects.get(key=key).definition)


def set_status(
    *, endpoints: models.QuerySet[Endpoint], status: Endpoint.Status, actor: Actor, reason: str = ""
) -> list[Endpoint]:
    """Gives these endpoints a status, and returns those that did not have it; one that is active starts anew.

    What is not verified stays so until its challenge is confirmed, what is deleted for good; either can be deleted.
    """
    with transaction.atomic():
        concerned = endpoints.exclude(status__in=[status, Endpoint.Status.DELETED])
        if status != Endpoint.Status.DELETED:
            verified = [name for name, contract in contracts.CONTRACTS.items() if contract.challenge]
            concerned = concerned.exclude(status=Endpoint.Status.UNVERIFIED, contract__in=verified)
        changed = list(
            concerned.select_related("tenant")
            .select_for_update(of=("self",), no_key=True)
            .order_by("pk")  # two that lock several must not wait for each other
        )
        values: dict[str, Any] = {"status": status, "status_reason": reason, "status_at": Now()}
        if status == Endpoint.Status.ACTIVE:
            values |= {"dead_in_a_row": 0, "failures_in_a_row": 0, "failing_since": None, "probe_at": None, "probes": 0}
            values["recovered_at"] = Now()  # what has gathered does not come all at once
        Endpoint.objects.filter(pk__in=[endpoint.pk for endpoint in changed]).update(**values)
        for endpoint in changed:
            record_audit(
                actor=actor,
                action=f"endpoint.{status}",
                of=endpoint,
                tenant=endpoint.tenant,
                reason=reason,
                changes={"status": [endpoint.status, status]},
            )
    return changed
