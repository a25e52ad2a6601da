"""What the receiver kit makes of headers that are nearly right."""

import hmac

import pytest

from endpoints.signing import SCHEMES, generate_ed25519_secret, generate_secret, parse_secret
from webhookhub import signatures
from webhookhub.receiver import SecretError, VerificationError, Verified, verify

NOW = 1_768_478_400
SECRET, OLD = generate_secret(), generate_secret()
PAIR = generate_ed25519_secret()
PUBLIC = parse_secret(PAIR).public_secret
BODY = b'{"n":1.10}'


def headers(*secrets, scheme="standard-webhooks", timestamp=NOW, **changes):
    keys = [SCHEMES[scheme].parse_secret(secret) for secret in secrets or [SECRET]]
    lines = dict(line.split(": ", 1) for line in SCHEMES[scheme]("evt_1", timestamp, BODY, keys))
    return lines | {name.replace("_", "-"): value for name, value in changes.items()}


def code(*args, **options):
    with pytest.raises(VerificationError) as refused:
        verify(*args, **{"now": NOW} | options)
    return refused.value.code


RIGHT = headers()["webhook-signature"]
WRONG = headers(OLD)["webhook-signature"]


@pytest.mark.parametrize(
    "line",
    [
        RIGHT,
        f"v2,x {RIGHT}",
        f"{WRONG} {RIGHT}",
        f"{WRONG}  {RIGHT}",
        f" {RIGHT} ",
        f"{WRONG} {WRONG} {WRONG} {RIGHT}",
        f"{RIGHT} {WRONG}",
        f"{headers(PAIR)['webhook-signature']} {RIGHT}",
    ],
)
def test_the_right_signature_is_found_wherever_it_stands(line):
    assert verify(BODY, headers(webhook_signature=line), [SECRET], now=NOW) == Verified("evt_1", NOW)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("v1,", "malformed_header"),
        ("v1", "malformed_header"),
        (RIGHT.removeprefix("v1,"), "malformed_header"),
        ("v1, " + RIGHT.removeprefix("v1,"), "malformed_header"),
        (RIGHT[:-1], "malformed_header"),  # no padding
        (RIGHT[:-4], "signature_mismatch"),
        (RIGHT[:7], "signature_mismatch"),  # of whole bytes
        (RIGHT + "====", "malformed_header"),
        (f"{RIGHT} junk", "malformed_header"),
        (f"{RIGHT}, {RIGHT}", "malformed_header"),  # two header lines that a framework has joined
        (f"{RIGHT}\t{RIGHT}", "malformed_header"),
        (RIGHT.replace("v1", "V1"), "malformed_header"),
        (RIGHT.replace("v1", "v1a"), "no_supported_signature"),
        ("v1,é", "malformed_header"),
    ],
)
def test_what_is_nearly_the_right_signature_is_refused(line, reason):
    assert code(BODY, headers(webhook_signature=line), [SECRET]) == reason


def test_the_last_bits_of_base64_that_stand_for_nothing_must_be_zero():
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    same_bytes = RIGHT[:-2] + alphabet[alphabet.index(RIGHT[-2]) + 1] + "="
    assert code(BODY, headers(webhook_signature=same_bytes), [SECRET]) == "malformed_header"


@pytest.mark.parametrize("text", ["", "+1768478400", " 1768478400", "1_768_478_400", "١٧٦٨", "1e9", "1" * 5_000])
def test_a_timestamp_is_digits(text):
    assert code(BODY, headers(webhook_timestamp=text), [SECRET]) in {"malformed_timestamp", "missing_header"}


@pytest.mark.parametrize("scheme", ["standard-webhooks", "stripe-like", "kingminos", "elicitra", "slack-like"])
def test_the_timestamp_may_be_as_far_off_as_the_tolerance_either_way(scheme):
    for offset in (-60, 60):
        verify(BODY, headers(scheme=scheme, timestamp=NOW + offset), SECRET, scheme=scheme, tolerance=60, now=NOW)
    for offset, reason in ((-61, "timestamp_too_old"), (61, "timestamp_too_new")):
        lines = headers(scheme=scheme, timestamp=NOW + offset)
        assert code(BODY, lines, SECRET, scheme=scheme, tolerance=60) == reason


def test_the_clock_is_read_when_no_time_is_given(monkeypatch):
    monkeypatch.setattr(signatures.time, "time", lambda: NOW + 300.0)
    assert verify(BODY, headers(), SECRET).timestamp == NOW
    monkeypatch.setattr(signatures.time, "time", lambda: NOW + 301.0)
    with pytest.raises(VerificationError, match="in the past"):
        verify(BODY, headers(), SECRET)


def test_header_names_are_read_in_any_case_and_refused_when_two_spellings_disagree():
    shouted = {name.title(): value for name, value in headers().items()}
    assert verify(BODY, shouted, [SECRET], now=NOW).message_id == "evt_1"
    assert code(BODY, headers() | {"Webhook-Id": "evt_2"}, [SECRET]) == "malformed_header"


def test_any_of_the_secrets_will_do_and_they_may_be_of_both_kinds():
    for signer in (SECRET, PAIR):
        assert verify(BODY, headers(signer), [OLD, PUBLIC, SECRET], now=NOW).message_id == "evt_1"
    assert code(BODY, headers(SECRET, PAIR), [OLD]) == "signature_mismatch"
    assert code(BODY, headers(PAIR), [OLD]) == "no_supported_signature"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("t={t},v1={s}, v1={s}", None),
        ("v1={s},t={t}", None),
        ("t={t},v0=x,v1={s}", None),
        ("t={t},t={t},v1={s}", "malformed_header"),
        ("t={t},v1=", "malformed_header"),
        ("t={t},{s}", "malformed_header"),
        ("t={t}", "no_supported_signature"),
        ("t=,v1={s}", "malformed_header"),
        ("t={t},v1={s}0", "malformed_header"),
        (",", "malformed_header"),
    ],
)
def test_a_list_of_pairs_is_read_strictly_and_in_any_order(line, reason):
    right = headers(scheme="stripe-like")["stripe-signature"].rpartition("=")[2]
    lines = {"Stripe-Signature": line.format(t=NOW, s=right)}
    if reason is None:
        assert verify(BODY, lines, SECRET, scheme="stripe-like", now=NOW) == Verified(None, NOW)
    else:
        assert code(BODY, lines, SECRET, scheme="stripe-like") == reason


def test_what_is_not_signed_is_not_reported():
    lines = headers(scheme="github-like")
    assert lines["webhook-id"] == "evt_1"
    assert verify(BODY, lines, SECRET, scheme="github-like") == Verified(None, None)
    bare = {"X-Hub-Signature-256": lines["x-hub-signature-256"].removeprefix("sha256=")}
    assert code(BODY, bare, SECRET, scheme="github-like") == "malformed_header"


def test_signatures_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(signatures.hmac, "compare_digest", lambda a, b: compared.append(len(b)) or False)
    for scheme in ("standard-webhooks", "stripe-like", "github-like", "shopify-like", "slack-like"):
        assert code(BODY, headers(scheme=scheme), SECRET, scheme=scheme) == "signature_mismatch"
    assert compared == [44, 64, 64, 44, 64]
    assert signatures.hmac is hmac


@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        ("whsec_", "secret_empty"),
        ("whsec_AAAA", "secret_too_short"),
        ("whsec_" + "AAAA" * 22, "secret_too_long"),
        (" " + SECRET, "secret_not_base64"),
        ("whpk_AAAA", "key_length"),
        (PAIR, "not_a_verifying_key"),
    ],
)
def test_an_unusable_secret_is_no_fault_of_the_request(secret, reason):
    with pytest.raises(SecretError) as refused:
        verify(BODY, headers(), [secret], now=NOW)
    assert refused.value.code == reason
    assert secret not in str(refused.value) or secret == "whsec_"


def test_mistakes_of_the_caller_are_named():
    with pytest.raises(SecretError, match="no secret"):
        verify(BODY, headers(), [])
    with pytest.raises(SecretError, match="empty"):
        verify(BODY, headers(), "", scheme="github-like")
    with pytest.raises(TypeError, match="raw bytes"):
        verify(BODY.decode(), headers(), SECRET)
    with pytest.raises(ValueError, match="unknown scheme 'sha1'"):
        verify(BODY, headers(), SECRET, scheme="sha1")
