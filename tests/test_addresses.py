"""The address rule against the table of targets, with a stub for DNS, and the lists an operator writes."""

import re
from contextlib import suppress
from dataclasses import FrozenInstanceError
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoints.addresses import DENIED_PORTS, AddressRule, Blocked, Target
from tests.vectors_loader import load

TABLE = load("egress_targets")
CASES: list[dict[str, Any]] = [*TABLE["cases"], *TABLE["boundary"]]
PRODUCTION = AddressRule()


def rule_of(config: dict[str, Any]) -> AddressRule:
    merged = {**TABLE["meta"]["default_config"], **config}
    opened = AddressRule.parse(networks=",".join(merged["allow_cidrs"]), hosts=",".join(merged["allow_hosts"]))
    return AddressRule(
        allowed_networks=opened.allowed_networks,
        allowed_hosts=opened.allowed_hosts,
        schemes=frozenset(merged["schemes"]),
        denied_ports=frozenset(merged["deny_ports"]),
        max_url_length=merged["max_url_length"],
    )


def verdict(rule: AddressRule, url: str, answers: list[str] | None) -> tuple[str, str, Target | None]:
    """What a save decides: allow or deny, why, and where the URL leads. `answers` stand for DNS."""
    try:
        target = rule.check_url(url)
        if target.address is None:
            rule.check_answers(target.host, answers or [])
    except Blocked as blocked:
        return "deny", blocked.reason, None
    return "allow", "", target


def refusal(url: str, rule: AddressRule = PRODUCTION) -> Blocked:
    with pytest.raises(Blocked) as caught:
        rule.check_url(url)
    return caught.value


@pytest.mark.vectors
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_egress_targets(case: dict[str, Any]) -> None:
    rule = rule_of(case.get("config", {}))
    decision, reason, target = verdict(rule, case["url"], case.get("resolve"))
    assert decision == case["expect"], reason
    if target is None:
        assert reason in {case["reason"], *case.get("reason_alternatives", [])}
        return
    assert target.host == case.get("normalized_host", target.host)
    for address in case.get("connect_to", []):
        rule.check_address(address, host=target.host)


@pytest.mark.vectors
@pytest.mark.parametrize("case", TABLE["rebinding"], ids=lambda case: case["id"])
def test_every_lookup_is_judged_anew(case: dict[str, Any]) -> None:
    lookups = case["resolve_sequence"]
    attempts = case.get("attempts") or [{"lookup": 0, "expect": case["expect"]}]
    rule = rule_of({})
    for attempt in attempts:
        decision, reason, _ = verdict(rule, case["url"], lookups[attempt["lookup"]])
        assert decision == attempt["expect"]
        assert reason == attempt.get("reason", "")
    if dialled := set(case.get("must_connect_only_to", [])):
        for address in dialled:
            rule.check_address(address)
        for address in {address for answers in lookups for address in answers} - dialled:
            with pytest.raises(Blocked):
                rule.check_address(address)


@pytest.mark.vectors
def test_the_table_of_blocks_is_the_whole_table() -> None:
    for row in TABLE["special_blocks"]:
        network = ip_network(row["block"])
        for address in (network.network_address, network.broadcast_address):
            with pytest.raises(Blocked):
                PRODUCTION.check_address(str(address))
    for address in TABLE["metadata_addresses"]:
        with pytest.raises(Blocked) as caught:
            PRODUCTION.check_address(address)
        assert caught.value.reason == "cloud_metadata"
    for name in TABLE["metadata_names"]:
        assert refusal(f"https://{name}/").reason == "cloud_metadata"
    for suffix in TABLE["special_use_suffixes"]:
        assert refusal(f"https://x.{suffix}/").reason == "hostname_special_use"
    assert frozenset(TABLE["meta"]["default_config"]["deny_ports"]) == DENIED_PORTS


@pytest.mark.vectors
@pytest.mark.parametrize("row", TABLE["python_ipaddress_drift"], ids=lambda row: row["address"])
def test_verdicts_do_not_drift_with_the_python_version(row: dict[str, Any]) -> None:
    with pytest.raises(Blocked) as caught:
        PRODUCTION.check_address(row["address"])
    assert (row["guard"], caught.value.reason) == ("deny", row["code"])


# --- URLs -----------------------------------------------------------------------------------------------------------


def test_a_target_says_where_the_url_leads() -> None:
    rule = AddressRule.parse(allow_http=True)
    assert rule.check_url("HTTPS://Hooks.Example.COM./In?a=%zz&b=/../c") == Target("https", "hooks.example.com", 443)
    assert rule.check_url("http://8.8.8.8") == Target("http", "8.8.8.8", 80, IPv4Address("8.8.8.8"))
    assert rule.check_url("https://[2606:4700::0:1111]:8443/") == Target(
        "https", "2606:4700::1111", 8443, IPv6Address("2606:4700::1111")
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://127.0.0.1.", "ip_literal_noncanonical"),
        ("https://0X7F000001/", "ip_literal_noncanonical"),
        ("https://example.0x/", "ip_literal_noncanonical"),
        ("https://[foo]/", "invalid_host"),
        ("https://[]/", "invalid_host"),
        ("https://[::1", "invalid_host"),
        ("https://[::1]:/", "invalid_port"),
        ("https://[2606:4700::1]443/", "invalid_host"),
        ("https://a..example.com/", "invalid_host"),
        (f"https://{'a' * 64}.example.com/", "invalid_host"),
        (f"https://{'a.' * 130}example.com/", "invalid_host"),
        (f"https://{'é' * 300}.example.com/", "invalid_host"),
        ("https://\u212a.example.net/", "idna_invalid"),
        ("https://\u0130.example.net/", "idna_invalid"),
        ("https://xn--example-.example.net/", "invalid_host"),
        ("https://xn--bcher-kva\u3002example.net/", "idna_invalid"),
        ("https://hooks.example.com:\u0661/", "invalid_port"),
        ("https://hooks.example.com:1e3/", "invalid_port"),
        ("https://hooks.example.com:443:443/", "invalid_host"),
        ("http://127.0.0.1:80\\@example.com/", "illegal_character"),
        ("https://example.com/\ud800", "illegal_character"),
        ("", "invalid_url"),
        ("https:", "invalid_url"),
    ],
)
def test_a_url_that_clients_could_read_differently_is_refused(url: str, reason: str) -> None:
    assert refusal(url, AddressRule.parse(allow_http=True)).reason == reason


@given(st.text(st.sampled_from("aé0127.:/@[]?#%\\x-_ \u200d\uff0e\U0001f600"), max_size=30))
def test_whatever_is_typed_gets_a_target_or_a_refusal(text: str) -> None:
    for url in (text, f"https://{text}"):
        with suppress(Blocked):
            host = PRODUCTION.check_url(url).host
            assert (host.isascii(), host) == (True, host.lower())


# --- what the operator opens ----------------------------------------------------------------------------------------


def test_lists_may_hold_spaces_empty_items_and_both_kinds() -> None:
    for rule in (
        AddressRule.parse(networks=" 10.0.0.5 , hook.internal,10.1.0.0/16 ,"),
        AddressRule.parse(hosts="10.0.0.5,\n\thook.internal ,, 10.1.0.0/16"),
    ):
        assert rule.check_url("https://10.0.0.5/").host == "10.0.0.5"
        assert rule.check_url("https://10.1.255.1:8443/").port == 8443
        rule.check_answers(rule.check_url("https://HOOK.internal./x").host, ["192.168.3.4", "::1"])
        blocked = refusal("https://10.2.0.1/", rule)
        assert str(blocked) == (
            "blocked by the address rule (private): 10.2.0.1 is not an ordinary public address; "
            "an operator can allow it with ALLOWED_NETWORKS."
        )


def test_empty_lists_open_nothing() -> None:
    assert AddressRule.parse(networks="", hosts=" , ") == PRODUCTION


@pytest.mark.parametrize(
    "item",
    ["10.0.0.5/8", "10.0.0.256", "10.0.0.0/33", "*.internal", "http://hook", "hook:8080", "[::1]", "a b", "2130706433"],
)
def test_a_bad_item_is_named_with_its_setting(item: str) -> None:
    start = re.escape(f"the item {item!r}, which is neither")
    with pytest.raises(ValueError, match=f"^ALLOWED_NETWORKS has {start}"):
        AddressRule.parse(networks=item)
    with pytest.raises(ValueError, match=f"^ALLOWED_HOSTS has {start}"):
        AddressRule.parse(hosts=f"hook, {item}")


def test_names_of_the_inner_network_can_be_opened() -> None:
    rule = AddressRule.parse(hosts="hook, my_worker, bücher.local", allow_http=True)
    assert rule.check_url("http://hook:8080/x") == Target("http", "hook", 8080)
    assert rule.check_url("http://my_worker/").host == "my_worker"
    assert rule.check_url("http://BÜCHER.local/").host == "xn--bcher-kva.local"
    assert refusal("http://other_worker/", rule).reason == "invalid_host"
    rule.check_address("172.18.0.3", host="hook")
    with pytest.raises(Blocked, match="ALLOWED_NETWORKS or ALLOWED_HOSTS"):
        rule.check_address("172.18.0.3", host="elsewhere.example.com")


def test_a_clouds_metadata_is_opened_by_its_network_and_by_no_name() -> None:
    with pytest.raises(Blocked) as caught:
        AddressRule.parse(hosts="metadata.google.internal").check_answers(
            "metadata.google.internal", ["169.254.169.254"]
        )
    assert caught.value.reason == "resolved:cloud_metadata"
    AddressRule.parse(networks="169.254.169.254").check_address("169.254.169.254")


def test_an_opened_ipv4_network_is_open_through_nat64_but_not_in_ipv4_mapped_form() -> None:
    rule = AddressRule.parse(networks="10.0.0.0/8")
    rule.check_address("64:ff9b::10.1.2.3")
    rule.check_address("64:ff9b::808:808")
    with pytest.raises(Blocked) as caught:
        rule.check_address("::ffff:10.1.2.3")
    assert caught.value.reason == "ipv4_mapped"


def test_plain_http_names_the_setting_that_opens_it() -> None:
    assert "ALLOW_HTTP" in str(refusal("http://hooks.example.com/"))


@pytest.mark.parametrize("text", ["", "localhost", "10.0.0.1/8", "127.1", "unix:/run/x", "0x7f000001", "fe80::1%eth0"])
def test_what_is_not_a_public_address_is_never_dialled(text: str) -> None:
    with pytest.raises(Blocked):
        PRODUCTION.check_address(text)
    with pytest.raises(Blocked):
        AddressRule.parse(hosts="hook").check_address(text if text != "fe80::1%eth0" else "", host="hook")


def test_a_name_without_answers_is_refused() -> None:
    with pytest.raises(Blocked) as caught:
        PRODUCTION.check_answers("hooks.example.com", [])
    assert caught.value.reason == "resolved:nothing"


def test_messages_do_not_repeat_what_a_url_may_keep_secret() -> None:
    for url in (
        "https://user:hunter2@example.com/",
        "https://example.com:0/?token=hunter2",
        "https://10.0.0.1/hunter2",
    ):
        assert "hunter2" not in str(refusal(url))


def test_a_rule_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PRODUCTION.max_url_length = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("url", "requested"),
    [
        ("https://example.com", "https://example.com"),
        ("https://Example.COM:443/A/../b?x=%2f&y=%7e", "https://example.com/A/../b?x=%2f&y=%7e"),
        ("https://m\u00fcller.de/h\u00f6?\u00fc=1", "https://xn--mller-kva.de/h%C3%B6?%C3%BC=1"),
        ("https://example.com:8443?x", "https://example.com:8443?x"),
        (
            "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]:8443/x",
            "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]:8443/x",
        ),
    ],
)
def test_what_is_requested_is_the_url_in_ascii_and_otherwise_byte_for_byte(url, requested):
    assert AddressRule().check_url(url).url == requested
