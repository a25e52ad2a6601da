"""Signatures and secrets."""

import base64

import pytest
from standardwebhooks import Webhook

from endpoints.encryption import Unreadable, seal, unseal
from endpoints.signing import SecretError, generate_secret, parse_secret, standard_webhooks
from tests import vectors_loader

VECTORS = vectors_loader.load("signatures")
STANDARD = [
    case
    for case in VECTORS["vectors"]
    if case["scheme"] == "standard-webhooks-v1"
    and case["kind"] == "positive"
    and "msg_id" in case
    and all(signer["version"] == "v1" for signer in case["signers"])
]
WHSEC = [case for case in VECTORS["secret_validation"] if case["secret"].strip()[:5] in {"whsec", "whpk_"}]


def header(lines, name):
    return next(line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: "))


@pytest.mark.vectors
@pytest.mark.parametrize("case", STANDARD, ids=lambda case: case["id"])
def test_standard_webhooks_signatures_are_the_ones_of_the_vectors(case):
    keys = [parse_secret(signer["secret"]) for signer in case["signers"]]
    lines = standard_webhooks(case["msg_id"], case["timestamp"], vectors_loader.build_bytes(case), keys)
    expected = {name.lower(): value for name, value in case["headers"].items()}
    assert header(lines, "webhook-signature") == expected["webhook-signature"]
    assert header(lines, "webhook-id") == expected["webhook-id"]
    assert header(lines, "webhook-timestamp") == expected["webhook-timestamp"]


def test_the_published_example_of_a_body_beyond_ascii():
    key = parse_secret("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
    body = '{"name":"Zoë ₹ 😊","n":1.10}'.encode()
    lines = standard_webhooks("msg_test_01", 1_700_000_000, body, [key])
    assert header(lines, "webhook-signature") == "v1,PBJZ0NZZtRMpyer1+euE8aV5d91Ly6/j+eS7s3Iarv8="


def test_each_of_several_keys_signs():
    import time

    secrets = [generate_secret(), generate_secret()]
    now = int(time.time())
    lines = standard_webhooks("evt_1", now, b"{}", [parse_secret(secret) for secret in secrets])
    headers = dict(line.split(": ", 1) for line in lines)
    for secret in secrets:
        Webhook(secret).verify(b"{}", headers)


@pytest.mark.vectors
@pytest.mark.parametrize("case", WHSEC, ids=lambda case: case["description"])
def test_a_secret_is_accepted_or_refused_with_the_reason(case):
    if case["expect"] == "accept":
        assert parse_secret(case["secret"])
        return
    with pytest.raises(SecretError) as refused:
        parse_secret(case["secret"])
    assert refused.value.code == case["reason"]
    assert case["secret"].strip().removeprefix("whsec_") not in str(refused.value) or case["secret"] == "whsec_"


def test_generated_secrets_hold_32_bytes_and_differ():
    assert len(base64.b64decode(generate_secret().removeprefix("whsec_"))) == 32
    assert generate_secret() != generate_secret()


def test_a_sealed_secret_opens_with_any_of_the_keys_and_with_no_other():
    from cryptography.fernet import Fernet

    old, new, other = (Fernet.generate_key().decode() for _ in range(3))
    sealed = seal("whsec_x", [old])
    assert b"whsec" not in sealed
    assert unseal(sealed, [new, old]) == "whsec_x"
    with pytest.raises(Unreadable):
        unseal(sealed, [new, other])
