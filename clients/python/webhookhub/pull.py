"""Pull what a sender could not deliver: each event goes through the receiver, as if it had been POSTed.

    from webhookhub.pull import pull

    pulled = pull("https://hub.example.com", API_KEY, receiver)

Needs `requests`.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from webhookhub.receiver import Receiver

if TYPE_CHECKING:
    import requests

__all__ = ["PullError", "Pulled", "pull"]

PAGE = 100  # events
LIST_BYTES = 2**20  # at most, of a page
TIMEOUT = (5, 30)  # seconds to connect, and between two pieces of an answer

_log = logging.getLogger(__name__)


class PullError(Exception):
    """The events could not be listed, or the address must not be given the key. The text says why."""


class Pulled(NamedTuple):
    """The ids of the events that were listed, oldest first.

    `repeated` had been processed before, with success. `failed` were not handed over, or the receiver raised, or its
    answer (today's, or the one it had stored) is no success; the log says why. `gone` are past the sender's window.
    """

    processed: list[str]
    repeated: list[str]
    failed: list[str]
    gone: list[str]


def pull(
    url: str, api_key: str, receiver: Receiver, *, session: requests.Session | None = None, allow_http: bool = False
) -> Pulled:
    """Has the receiver process all events that the hub at `url` lists for the endpoint of `api_key`.

    The key is sent by https or to this machine only, unless `allow_http`. An event that fails stops no other. Raises
    PullError.
    """
    import requests

    _check_url(url, allow_http)
    pulled = Pulled([], [], [], [])
    hub = _Hub(url, api_key, session or requests.Session())
    try:
        for event_id in hub.event_ids():
            _outcome(hub, event_id, receiver, pulled).append(event_id)
    finally:
        if session is None:
            hub.session.close()
    return pulled


def _outcome(hub: _Hub, event_id: str, receiver: Receiver, pulled: Pulled) -> list[str]:
    try:
        status, body, headers = hub.get(f"/v1/replay/{quote(event_id, safe='')}", receiver.max_body)
        if status == 410:
            return pulled.gone
        if status != 200:
            raise PullError(f"the hub answered {status}")
        response = receiver.receive(body, headers)
    except Exception:  # whatever the handler raises: the next events are to be had all the same
        _log.exception("event %s failed", event_id)
        return pulled.failed
    if not 200 <= response.status <= 299:
        _log.error("event %s failed: the receiver answered %s", event_id, response.status)
        return pulled.failed
    return pulled.repeated if response.repeated else pulled.processed


class _Hub:
    def __init__(self, url: str, api_key: str, session: requests.Session) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key
        self.session = session

    def get(self, path: str, most: int) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, body and headers. Raises PullError for a body of more than so many bytes, and without an answer."""
        import requests

        try:
            with self.session.get(
                self._url + path,
                auth=self._authorize,
                headers={"Accept-Encoding": "identity"},
                timeout=TIMEOUT,
                allow_redirects=False,  # the key is for this address
                stream=True,
            ) as answer:
                body = b""
                for piece in answer.iter_content(65_536):
                    body += piece
                    if len(body) > most:
                        raise PullError(f"{path}: the answer is larger than {most} bytes")
                return answer.status_code, body, answer.headers
        except requests.RequestException as error:
            raise PullError(f"{path}: {error}") from error

    def event_ids(self) -> Iterator[str]:
        """All of them, page after page. Raises PullError."""
        cursor, seen = None, set()
        while True:
            query = urlencode({"limit": PAGE} if cursor is None else {"limit": PAGE, "cursor": cursor})
            status, body, _ = self.get(f"/v1/replay?{query}", LIST_BYTES)
            if status != 200:
                raise PullError(f"/v1/replay: the hub answered {status}: {body[:200].decode(errors='replace')}")
            try:
                page = json.loads(body)
                found, following = [str(event["event_id"]) for event in page["data"]], page.get("next_cursor")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise PullError("/v1/replay: the answer is not a list of events") from error
            yield from found
            if following is None:
                return
            if not isinstance(following, str) or not following.isprintable() or following in seen:
                raise PullError("/v1/replay: the list does not go on after its cursor")
            seen.add(following)
            cursor = following

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # Not among the headers, where a line in ~/.netrc would take its place.
        request.headers["Authorization"] = f"Bearer {self._api_key}"
        return request


def _check_url(url: str, allow_http: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PullError(f"{url!r} is not the address of a hub, like https://hub.example.com")
    if parts.scheme == "http" and not allow_http and not _is_loopback(parts.hostname):
        raise PullError(f"the key would go to {parts.hostname} in the clear: use https, or say allow_http=True")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
