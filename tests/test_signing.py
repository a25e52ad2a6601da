"""Signatures and secrets, and the receiver kit on what we sign."""

import base64
import hashlib
import hmac
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from endpoints.encryption import Unreadable, seal, unseal
from endpoints.signing import (
    SCHEMES,
    Ed25519Key,
    SecretError,
    encode_key,
    generate_ed25519_secret,
    generate_secret,
    parse_secret,
)
from tests import vectors_loader
from webhookhub import receiver as kit

VECTORS = vectors_loader.load("signatures")
OURS = {  # the schemes of the vectors by our names for them
    "standard-webhooks-v1": "standard-webhooks",
    "standard-webhooks-v1a": "standard-webhooks",
    "standard-webhooks-mixed": "standard-webhooks",
    "svix-v1": "svix",
    "stripe-like": "stripe-like",
    "kingminos": "kingminos",
    "elicitra": "elicitra",
    "github-like": "github-like",
    "shopify-like": "shopify-like",
    "slack-like": "slack-like",
}
VERIFIED_ONLY = {"svix-v1"}  # the names that Standard Webhooks' headers had before it; we send today's


def _twilio(case):
    fields = "".join(name + value for name, value in sorted(case["params"].items()))
    digest = hmac.digest(case["secret"].encode(), (case["url"] + fields).encode(), "sha1")
    return {"X-Twilio-Signature": base64.b64encode(digest).decode()}


def _message_signature(case):
    key = Ed25519Key.from_seed(bytes.fromhex(case["seed_hex"]))
    assert key.public.hex() == case["public_hex"]
    signature = base64.b64encode(key.private.sign(case["signature_base"].encode())).decode()
    return {"Signature": f"sig-b26=:{signature}:"}


def _content_digest(case):
    digest = hashlib.sha256(vectors_loader.build_bytes(case)).digest()
    return {"Content-Digest": f"sha-256=:{base64.b64encode(digest).decode()}:"}


# Published anchors of schemes that no contract of ours asks for: signing them takes what we have all the same.
ANCHORS = {"twilio-like": _twilio, "rfc9421": _message_signature, "content-digest": _content_digest}


def our_name(case):
    return "elicitra-split" if case.get("variant") == "split-headers" else OURS[case["scheme"]]


def fields(lines):
    return dict(line.split(": ", 1) for line in lines)


def signed(case, body):
    """The headers that we send, of what a case says was signed."""
    scheme = SCHEMES[our_name(case)]
    if "signers" in case:
        secrets = [signer["secret"] for signer in case["signers"]]
    else:
        secrets = dict.fromkeys([case["secret"], case["verify"]["secret"]])  # they differ where a secret was rotated
    message_id = case.get("msg_id") or case["headers"].get("KingMinos-Event-Id") or "evt_1"
    return fields(scheme(message_id, case["timestamp"], body, [scheme.parse_secret(one) for one in secrets]))


def outcome(case, body):
    """What the kit makes of a case: what it verified, or the code of its refusal."""
    how = case["verify"]
    options = {"scheme": our_name(case), "tolerance": how["tolerance"], "now": how["now"]}
    try:
        return kit.verify(body, case["headers"], [how["secret"]], **options)
    except kit.VerificationError as refused:
        return refused.code


@pytest.mark.vectors
@pytest.mark.parametrize("case", VECTORS["vectors"], ids=lambda case: case["id"])
def test_signatures(case):
    if case["scheme"] in ANCHORS:
        made = ANCHORS[case["scheme"]](case)
        assert (case["expect"] == "accept") is (made.items() <= case["headers"].items())
        return
    body = vectors_loader.build_bytes(case)
    assert hashlib.sha256(body).hexdigest() == case["body_sha256"]
    found = outcome(case, body)
    if case["expect"] == "reject":
        allowed = {case["reason"], *case.get("acceptable_alternatives", [])}
        assert ("accept" if isinstance(found, kit.Verified) else found) in allowed
        return
    assert isinstance(found, kit.Verified), found
    assert found.message_id == case.get("msg_id")
    if case["scheme"] not in VERIFIED_ONLY:
        # The id of a delivery is not known to a scheme.
        right = {name.lower(): value for name, value in case["headers"].items() if name != "KingMinos-Delivery-Id"}
        assert right.items() <= signed(case, body).items()


@pytest.mark.vectors
def test_every_scheme_of_the_vectors_is_sent_or_verified_or_an_anchor():
    schemes = {case["scheme"] for case in VECTORS["vectors"]}
    assert schemes <= set(OURS) | set(ANCHORS)
    assert {OURS[scheme] for scheme in set(OURS) - VERIFIED_ONLY} | {"elicitra-split"} == set(SCHEMES)


@pytest.mark.vectors
@pytest.mark.parametrize("case", VECTORS["secret_validation"], ids=lambda case: case["description"])
def test_a_secret_is_accepted_or_refused_with_the_reason(case):
    if case["expect"] == "accept":
        assert encode_key(parse_secret(case["secret"])) == case["secret"]
        return
    with pytest.raises(SecretError) as refused:
        parse_secret(case["secret"])
    assert refused.value.code == case["reason"]
    held = case["secret"].strip().removeprefix("whsec_").removeprefix("whsk_").removeprefix("whpk_")
    assert not held or held not in str(refused.value)


def test_the_published_example_of_a_body_beyond_ascii():
    key = parse_secret("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
    old = parse_secret("whsec_ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8=")
    body = '{"name":"Zoë ₹ 😊","n":1.10}'.encode()
    headers = fields(SCHEMES["standard-webhooks"]("msg_test_01", 1_700_000_000, body, [key, old]))
    assert headers["webhook-signature"] == (
        "v1,PBJZ0NZZtRMpyer1+euE8aV5d91Ly6/j+eS7s3Iarv8= v1,E4fBCzAoCnUQAs5e6z9pH8iQ1BpCTCOE0/6qqgoNShQ="
    )


def test_each_of_several_keys_signs():
    secrets = [generate_secret(), generate_secret()]
    keys = [parse_secret(secret) for secret in secrets]
    headers = fields(SCHEMES["standard-webhooks"]("evt_1", int(time.time()), b"{}", keys))
    for secret in secrets:
        Webhook(secret).verify(b"{}", headers)


def test_a_header_with_room_for_one_signature_holds_the_first_keys():
    first, second = b"first", b"second"
    for name in ("github-like", "shopify-like", "slack-like", "elicitra-split"):
        assert SCHEMES[name]("evt_1", 1, b"{}", [first, second]) == SCHEMES[name]("evt_1", 1, b"{}", [first])


def test_an_id_with_a_full_stop_is_not_signed():
    with pytest.raises(ValueError, match="full stop"):
        SCHEMES["standard-webhooks"]("evt.1", 1, b"{}", [bytes(32)])


@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_is_signed_with_no_key(name):
    with pytest.raises(ValueError, match="no key"):
        SCHEMES[name]("evt_1", 1, b"{}", [])


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - {"standard-webhooks"}))
def test_an_ed25519_key_is_refused_where_hmac_signs(name):
    with pytest.raises(SecretError) as refused:
        SCHEMES[name]("evt_1", 1, b"{}", [Ed25519Key.from_seed(bytes(32))])
    assert refused.value.code == "not_an_hmac_key"


@pytest.mark.parametrize(
    ("secret", "code"),
    [
        ("", "secret_empty"),
        (" a", "secret_has_spaces"),
        ("a\n", "secret_has_spaces"),
        ("whpk_AA==", "not_a_signing_key"),
    ],
)
def test_a_text_that_can_be_no_secret_is_refused(secret, code):
    with pytest.raises(SecretError) as refused:
        SCHEMES["github-like"].parse_secret(secret)
    assert refused.value.code == code


def test_a_key_does_not_show_its_secret_half():
    key = parse_secret(generate_ed25519_secret())
    assert encode_key(key).removeprefix("whsk_")[:40] not in repr(key)
    assert "private" not in repr(key)


def test_generated_secrets_hold_32_bytes_and_differ():
    assert len(base64.b64decode(generate_secret().removeprefix("whsec_"))) == 32
    assert generate_secret() != generate_secret()
    assert generate_ed25519_secret() != generate_ed25519_secret()
    assert SCHEMES["kingminos"].generate_secret().startswith("kmwhsec_")
    assert SCHEMES["elicitra"].generate_secret().startswith("elsec_")


# --- What one side signs, the other verifies


def pair(name, generate=None):
    """A scheme, a secret that signs, and the one that verifies."""
    secret = (generate or SCHEMES[name].generate_secret)()
    key = SCHEMES[name].parse_secret(secret)
    return name, secret, key.public_secret if isinstance(key, Ed25519Key) else secret


PAIRS = [*(pair(name) for name in SCHEMES), pair("standard-webhooks", generate_ed25519_secret)]
ids = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
times = st.integers(0, 2**33)


@given(st.lists(st.sampled_from(PAIRS), min_size=1, max_size=3), ids, times, st.binary(max_size=2_000), st.data())
def test_what_is_signed_is_verified_by_each_of_its_secrets(pairs, message_id, timestamp, body, data):
    name = pairs[0][0]
    pairs = [one for one in pairs if one[0] == name]
    headers = fields(
        SCHEMES[name](message_id, timestamp, body, [SCHEMES[name].parse_secret(secret) for _, secret, _ in pairs])
    )
    _, _, verifying = data.draw(st.sampled_from(pairs))
    verified = kit.verify(body, headers, [verifying], scheme=name, now=timestamp)
    assert verified.message_id in {message_id, None}
    assert verified.timestamp in {timestamp, None}
    with pytest.raises(kit.VerificationError):
        other = pair(name)[2]
        kit.verify(body, headers, [other], scheme=name, now=timestamp)


@given(st.sampled_from(PAIRS), ids, times, st.binary(min_size=1, max_size=200), st.data())
def test_a_flipped_bit_is_refused(one, message_id, timestamp, body, data):
    name, secret, verifying = one
    headers = fields(SCHEMES[name](message_id, timestamp, body, [SCHEMES[name].parse_secret(secret)]))
    if name != "standard-webhooks":  # the others do not sign the id
        headers = {header: value for header, value in headers.items() if not header.endswith("-id")}
    where = data.draw(st.sampled_from(["body", *headers]))
    text = body if where == "body" else headers[where].encode()
    bit = data.draw(st.integers(0, 8 * len(text) - 1))
    flipped = (int.from_bytes(text) ^ 1 << bit).to_bytes(len(text))
    if where == "body":
        body = flipped
    else:
        headers[where] = flipped.decode("latin-1")
    with pytest.raises(kit.VerificationError):
        kit.verify(body, headers, [verifying], scheme=name, now=timestamp, tolerance=2**40)


# --- Encryption of secrets


def test_a_sealed_secret_opens_with_any_of_the_keys_and_with_no_other():
    from cryptography.fernet import Fernet

    old, new, other = (Fernet.generate_key().decode() for _ in range(3))
    sealed = seal("whsec_x", [old])
    assert b"whsec" not in sealed
    assert unseal(sealed, [new, old]) == "whsec_x"
    with pytest.raises(Unreadable):
        unseal(sealed, [new, other])
