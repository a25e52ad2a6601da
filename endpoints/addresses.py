"""The address rule: where a request of ours may go.

A tenant chooses the URL, and it must not lead to what only our own network can reach. A URL is checked when it is
saved, the answers for its name at save and verification, and the very address being dialled at every connect, because
names change their answers. What two clients could read differently is refused; the text of a URL is never rewritten.

`ipaddress.is_global` is not asked: it differs between Python versions and from IANA's registries. The table is here.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self
from urllib.parse import quote

import idna

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# The "bad ports" of the WHATWG Fetch standard (https://fetch.spec.whatwg.org/#port-blocking): other protocols' homes.
DENIED_PORTS = frozenset(
    [
        *(0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104),
        *(109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515, 526),
        *(530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659),
        *(4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080),
    ]
)
DEFAULT_PORTS = {"https": 443, "http": 80}

# IANA's special-purpose registries (iana-ipv4-special-registry, iana-ipv6-special-registry), the multicast ranges
# (RFC 5771, RFC 4291 2.7), the deprecated IPv6 forms that carry an IPv4 address (RFC 4291 2.5.5.1, RFC 2765) and
# fec0::/10 (RFC 3879). Rows that IANA calls globally reachable (anycast services, AS112, AMT, ORCHID, drone ids) are
# here too: no customer lives there, and anycast reaches the nearest NAT box. The most specific block decides.
_BLOCKS = {
    "unspecified": ["0.0.0.0/32", "::/128"],
    "this_network": ["0.0.0.0/8"],
    "private": ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"],
    "shared_cgnat": ["100.64.0.0/10"],
    "loopback": ["127.0.0.0/8", "::1/128"],
    "link_local": ["169.254.0.0/16", "fe80::/10"],
    "ietf_protocol": ["192.0.0.0/24", "2001::/23"],
    "special_anycast": ["192.0.0.9/32", "192.0.0.10/32", "2001:1::1/128", "2001:1::2/128", "2001:1::3/128"],
    "documentation": ["192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"],
    "as112": ["192.31.196.0/24", "192.175.48.0/24", "2001:4:112::/48", "2620:4f:8000::/48"],
    "amt": ["192.52.193.0/24", "2001:3::/32"],
    "sixto4_relay": ["192.88.99.0/24"],
    "benchmarking": ["198.18.0.0/15", "2001:2::/48"],
    "multicast": ["224.0.0.0/4", "ff00::/8"],
    "reserved": ["240.0.0.0/4"],
    "broadcast": ["255.255.255.255/32"],
    "ipv4_compatible": ["::/96"],
    "ipv4_mapped": ["::ffff:0:0/96"],
    "ipv4_translated": ["::ffff:0:0:0/96"],
    "nat64_local": ["64:ff9b:1::/48"],
    "discard": ["100::/64", "100:0:0:1::/64"],
    "teredo": ["2001::/32"],
    "orchid": ["2001:10::/28", "2001:20::/28"],
    "drone_det": ["2001:30::/28"],
    "sixto4": ["2002::/16"],
    "srv6": ["5f00::/16"],
    "unique_local": ["fc00::/7"],
    "site_local": ["fec0::/10"],
    # Where clouds hand credentials to whoever asks: AWS, GCP and most others; ECS tasks; EKS pods; Alibaba; Azure (in
    # no registry); Oracle; AWS and EKS over IPv6; GCP over IPv6.
    "cloud_metadata": [
        *("169.254.169.254/32", "169.254.170.2/32", "169.254.170.23/32", "100.100.100.200/32", "168.63.129.16/32"),
        *("192.0.0.192/32", "fd00:ec2::254/128", "fd00:ec2::23/128", "fd20:ce::254/128"),
    ],
}
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: carries an IPv4 address, which decides
_GLOBAL_UNICAST = IPv6Network("2000::/3")  # all that IANA has given out for unicast

_METADATA_NAMES = frozenset(
    {
        *("metadata.google.internal", "metadata.goog"),
        *("metadata.azure.internal", "metadata.azure.com"),
        "instance-data.ec2.internal",
    }
)
# Ends of names that public DNS does not hold.
_SPECIAL_USE = frozenset(
    {
        *("localhost", "test", "invalid", "example"),  # RFC 6761
        *("local", "onion", "home.arpa", "alt"),  # RFC 6762, 7686, 8375, 9476
        *("internal", "corp", "home"),  # ICANN: for private use; never to be delegated
        *("localdomain", "intranet", "private", "lan"),  # in wide use inside
        "arpa",  # infrastructure, RFC 3172
    }
)


class Blocked(ValueError):
    """A URL or an address is refused; `reason` is the code for it, a text for people is the message."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(f"blocked by the address rule ({reason}): {sentence}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads: `host` in lower case, as A-labels, without the root's dot; `address` when it is a literal.

    `url` is what to request: the host as here, all after it byte for byte, but for what is not ASCII, which becomes
    percent-encoded UTF-8 (RFC 3987 section 3.1).
    """

    scheme: str
    host: str
    port: int
    address: Address | None = None
    url: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class AddressRule:
    """The operator's choice of what may be reached besides ordinary public addresses, and the checks that follow it.

    `allowed_networks` opens addresses. `allowed_hosts` opens names, whatever they resolve to, except for the clouds'
    metadata addresses, which only a network opens. `schemes` are https, http; `max_url_length` is in characters.
    """

    allowed_networks: tuple[Network, ...] = ()
    allowed_hosts: frozenset[str] = frozenset()
    schemes: frozenset[str] = frozenset({"https"})
    denied_ports: frozenset[int] = DENIED_PORTS
    max_url_length: int = 2048

    @classmethod
    def parse(cls, *, networks: str = "", hosts: str = "", allow_http: bool = False) -> Self:
        """Build a rule from comma-separated lists, as settings hold them. An address or network among the hosts, or a
        host among the networks, is taken for what it is. Raises `ValueError` naming an item that is neither.
        """
        items = [*_parse_list("ALLOWED_NETWORKS", networks), *_parse_list("ALLOWED_HOSTS", hosts)]
        return cls(
            allowed_networks=tuple(item for item in items if not isinstance(item, str)),
            allowed_hosts=frozenset(item for item in items if isinstance(item, str)),
            schemes=frozenset({"https", "http"} if allow_http else {"https"}),
        )

    def check_url(self, url: str) -> Target:
        """Read a URL strictly, or raise `Blocked`. Resolves nothing: a name's answers are `check_answers`' matter."""
        if len(url) > self.max_url_length:
            raise Blocked("url_too_long", f"the URL is longer than {self.max_url_length} characters.")
        if illegal := next(filter(_is_illegal, url), None):
            raise Blocked(
                "illegal_character",
                f"the URL contains {illegal!a}; spaces, control characters, invisible characters and backslashes "
                "must be percent-encoded.",
            )
        scheme, authority, rest = self._split(url)
        host, port = _split_port(authority, DEFAULT_PORTS[scheme])
        if host.startswith("["):
            address: Address | None = _read_ipv6(host)
            name = str(address)
        else:
            name = _canonical_name(host)
            address = _read_ipv4(host) if _ends_in_a_number(name) else None
        if address is None:
            self._check_name(name)
        else:
            self.check_address(str(address))
        if port in self.denied_ports:
            raise Blocked("port_not_allowed", f"port {port} belongs to a protocol other than HTTP; use another port.")
        shown_host = f"[{name}]" if isinstance(address, IPv6Address) else name
        shown_port = "" if port == DEFAULT_PORTS[scheme] else f":{port}"
        return Target(scheme, name, port, address, f"{scheme}://{shown_host}{shown_port}{quote(rest, safe=_ASCII)}")

    def check_address(self, address: str, *, host: str = "") -> None:
        """Raise `Blocked` unless this address may be dialled, `host` being the canonical name it was resolved from.
        Cheap enough for every connect: the verdict on an address is remembered.
        """
        if reason := self._fault(address, host):
            raise Blocked(reason, _sentence(address, host, reason))

    def check_answers(self, host: str, addresses: Iterable[str]) -> None:
        """Raise `Blocked` unless every address that a name resolves to may be dialled, and there is one."""
        answers = list(addresses)
        if not answers:
            raise Blocked("resolved:nothing", f"{_shown(host)} resolves to no address; publish one in DNS.")
        for address in answers:
            if reason := self._fault(address, host):
                raise Blocked(f"resolved:{reason}", _sentence(address, host, reason))

    def _fault(self, address: str, host: str) -> str:
        reason, readings = _classify(address)
        if not reason or any(reading in network for reading in readings for network in self.allowed_networks):
            return ""
        if host in self.allowed_hosts and readings and not reason.endswith("cloud_metadata"):
            return ""
        return reason

    def _split(self, url: str) -> tuple[str, str, str]:
        """Scheme, authority, and the rest, which is the receiver's business."""
        scheme, colon, rest = url.partition(":")
        if not colon or not _SCHEME.fullmatch(scheme):
            raise Blocked("invalid_url", "the URL has no scheme; it must begin with https://.")
        scheme = scheme.lower()
        if scheme not in self.schemes:
            way_out = "an operator can allow it with ALLOW_HTTP" if scheme == "http" else "use https"
            raise Blocked("scheme_not_allowed", f"the scheme {_shown(scheme)} is not allowed; {way_out}.")
        if not rest.startswith("//"):
            raise Blocked("invalid_url", f"{scheme}: is not followed by //.")
        if "#" in rest:
            raise Blocked("fragment_not_allowed", "a fragment (#...) is never sent; remove it.")
        authority = _END_OF_AUTHORITY.split(rest[2:], maxsplit=1)[0]
        rest = rest[2 + len(authority) :]
        if "@" in authority:
            raise Blocked(
                "userinfo_not_allowed",
                "a URL must not hold a user or a password; put a token into the path or the query.",
            )
        return scheme, authority, rest

    def _check_name(self, name: str) -> None:
        if name in self.allowed_hosts:
            return
        if "_" in name:
            raise Blocked(
                "invalid_host", f"{_shown(name)} has an underscore, which no certificate may; {_OPEN_WITH_HOSTS}."
            )
        if name in _METADATA_NAMES:
            raise Blocked(
                "cloud_metadata",
                f"{name} is a cloud's metadata service; {_OPEN_WITH_HOSTS}, and its address with ALLOWED_NETWORKS.",
            )
        labels = name.split(".")
        if labels[-1] in _SPECIAL_USE or ".".join(labels[-2:]) in _SPECIAL_USE:
            raise Blocked("hostname_special_use", f"{name} is not a name of the public DNS; {_OPEN_WITH_HOSTS}.")
        if len(labels) == 1:
            raise Blocked(
                "hostname_single_label", f"{name} has no dot, so that its network decides on it; {_OPEN_WITH_HOSTS}."
            )


_ASCII = "".join(map(chr, range(0x21, 0x7F)))
_OPEN_WITH_HOSTS = "an operator can allow it with ALLOWED_HOSTS"


def _sentence(address: str, host: str, reason: str) -> str:
    if reason == "invalid_address":
        return f"{_shown(address)} is not an IP address."
    subject = f"{_shown(host)} resolves to {address}, which" if host else address
    only_networks = not host or reason.endswith("cloud_metadata")
    setting = "ALLOWED_NETWORKS" if only_networks else "ALLOWED_NETWORKS or ALLOWED_HOSTS"
    return f"{subject} is not an ordinary public address; an operator can allow it with {setting}."


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")


# --- addresses ------------------------------------------------------------------------------------------------------


def _ranges(version: int) -> Iterator[tuple[int, int, str]]:
    """First and last address and code of each block, the most specific first."""
    blocks = [(ip_network(block), code) for code, blocks in _BLOCKS.items() for block in blocks]
    for network, code in sorted(blocks, key=lambda pair: -pair[0].prefixlen):
        if network.version == version:
            yield int(network.network_address), int(network.broadcast_address), code


_RANGES = {version: tuple(_ranges(version)) for version in (4, 6)}


@lru_cache(maxsize=8192)
def _classify(text: str) -> tuple[str, tuple[Address, ...]]:
    """Why an address is no ordinary public one, "" if it is; and the addresses it can be read as: itself, and the IPv4
    address within it if that is what the translator on the way would dial.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return "invalid_address", ()
    if address in _NAT64:
        carried = IPv4Address(int(address) & 0xFFFF_FFFF)
        reason = _reason(carried)
        return reason and f"nat64:{reason}", (address, carried)
    return _reason(address), (address,)


def _reason(address: Address) -> str:
    number = int(address)
    for first, last, code in _RANGES[address.version]:
        if first <= number <= last:
            return code
    return "" if address.version == 4 or address in _GLOBAL_UNICAST else "ipv6_not_global_unicast"


# --- the text of URLs and lists --------------------------------------------------------------------------------------

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_END_OF_AUTHORITY = re.compile(r"[/?]")
_HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::([^:]*))?")
_PORT = re.compile(r"0|[1-9][0-9]{0,4}")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
# Control, format (invisible) and surrogate characters; spaces, line and paragraph separators.
_ILLEGAL_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zs", "Zl", "Zp"})


def _is_illegal(character: str) -> bool:
    return character == "\\" or unicodedata.category(character) in _ILLEGAL_CATEGORIES


def _split_port(authority: str, default: int) -> tuple[str, int]:
    """Host (an IPv6 address still in its brackets) and port."""
    parts = _HOST_AND_PORT.fullmatch(authority)
    if not parts:
        raise Blocked("invalid_host", f"{_shown(authority)} is not a host and a port; write IPv6 as [address].")
    host, port = parts.groups()
    if not host:
        raise Blocked("missing_host", "the URL names no host.")
    if port is None:
        return host, default
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise Blocked("invalid_port", f"{_shown(port)} is not a port; write a number from 1 to 65535, or no colon.")
    return host, int(port)


def _read_ipv6(host: str) -> IPv6Address:
    if "%" in host:
        raise Blocked("zone_id_not_allowed", f"{_shown(host)} names an interface of one machine; remove the zone id.")
    try:
        return IPv6Address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise Blocked("invalid_host", f"{_shown(host)} is not an IPv6 address in brackets.") from None


def _ends_in_a_number(name: str) -> bool:
    """Whether clients take a name for an IPv4 address: the "ends in a number" test of the WHATWG URL standard."""
    return _NUMBER.fullmatch(name.rpartition(".")[2]) is not None


def _read_ipv4(host: str) -> IPv4Address:
    try:
        return IPv4Address(host)
    except ValueError:
        raise Blocked(
            "ip_literal_noncanonical",
            f"{_shown(host)} is a number that clients read differently; write an address as four decimal numbers.",
        ) from None


def _canonical_name(host: str) -> str:
    """A host in lower case, as A-labels (IDNA2008), without the root's dot. Underscores pass here, as names of an
    operator's own network have them.
    """
    if len(host) > 254:  # RFC 1035: 253 characters, and the dot
        raise Blocked("invalid_host", f"{_shown(host)} is longer than 253 characters.")
    labels = [_a_label(label) for label in "".join(map(_lower, host)).removesuffix(".").split(".")]
    name = ".".join(labels)
    if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise Blocked(
            "invalid_host",
            f"{_shown(host)} is not a host name; use letters, digits, inner hyphens and dots, and no percent-encoding.",
        )
    return name


def _lower(character: str) -> str:
    """Lower case, but for letters that would become ASCII or two (the Kelvin sign, U+0130), which IDNA then refuses."""
    lower = character.lower()
    return lower if len(lower) == 1 and lower.isascii() == character.isascii() else character


def _a_label(label: str) -> str:
    """A label as DNS holds it. Plain ASCII is returned as it is. `idna` gets one label at a time and maps nothing, so
    that no look-alike of a dot, a digit or a slash becomes one.
    """
    if label.isascii() and not (label.startswith("xn--") and _LABEL.fullmatch(label)):
        return label
    try:
        a_label = idna.alabel(idna.ulabel(label)).decode()
    except UnicodeError as error:
        raise Blocked("idna_invalid", f"{_shown(label)} is not a valid IDNA2008 label ({error}).") from None
    if label.isascii() and a_label != label:
        raise Blocked("idna_invalid", f"{_shown(label)} is another spelling of {_shown(a_label)}; use that.")
    return a_label


def _parse_list(setting: str, text: str) -> Iterator[Network | str]:
    for item in filter(None, map(str.strip, text.split(","))):
        try:
            yield ip_network(item)
            continue
        except ValueError as error:
            fault = str(error)
        try:
            name = _canonical_name(item)
        except Blocked:
            name = ""
        if not name or _ends_in_a_number(name):
            raise ValueError(
                f"{setting} has the item {_shown(item)}, which is neither an address, nor a network, nor a plain host "
                f"name without scheme, port or wildcard ({fault})."
            )
        yield name
