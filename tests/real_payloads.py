"""`script/try-real-payloads`: real payloads through the running product, checked at the receiver."""

import base64
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import requests
from standardwebhooks import Webhook

from bench import harness
from bench.idle import product
from tests.receiver import Receiver

VERIFY = """
const { Webhook } = require("standardwebhooks");
const received = JSON.parse(require("fs").readFileSync(0));
const webhook = new Webhook(received.secret);
let accepted = 0;
for (const { headers, body } of received.requests) {
    webhook.verify(Buffer.from(body, "base64").toString(), headers);
    accepted += 1;
}
console.log(accepted);
"""


def payloads(packages: Path) -> list[tuple[str, bytes]]:
    """(event type, payload) of every example, written compact, spaced and indented in turn."""
    index = packages / "node_modules" / "@octokit" / "webhooks-examples" / "api.github.com" / "index.json"
    styles = [{"separators": (",", ":")}, {"separators": (", ", ": "), "ensure_ascii": False}, {"indent": 2}]
    found = []
    for event in json.loads(index.read_text()):
        for example in event["examples"]:
            text = json.dumps(example, **styles[len(found) % len(styles)])
            found.append((f"github.{event['name']}", text.encode()))
    return found


def main() -> None:
    packages = Path(sys.argv[1])
    examples = payloads(packages)
    with harness.hub("real-payloads-hub"), Receiver() as receiver:
        from endpoints.models import ApiKey, Endpoint, Tenant
        from endpoints.services import SYSTEM, create_api_key, create_endpoint

        tenant = Tenant.objects.create(name="GitHub")
        key = create_api_key(key=ApiKey(tenant=tenant, name="examples"), actor=SYSTEM)
        secret = create_endpoint(endpoint=Endpoint(tenant=tenant, name="all", url=receiver.url), actor=SYSTEM)
        port = harness.free_port()
        sent: dict[str, bytes] = {}
        with product(port), requests.Session() as session:
            for event_type, payload in examples:
                body = b'{"type":%s,"data":%s}' % (json.dumps(event_type).encode(), payload)
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                answer = session.post(f"http://127.0.0.1:{port}/v1/events", data=body, headers=headers, timeout=30)
                assert answer.status_code == 202, f"{event_type}: {answer.status_code} {answer.text}"
                sent[answer.json()["id"]] = payload
            end = time.monotonic() + 60
            while len(receiver.received) < len(sent) and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(1)  # for what would come twice

    counts = Counter(request.header("webhook-id") for request in receiver.received)
    assert counts == Counter(dict.fromkeys(sent, 1)), f"{len(sent)} sent, {sum(counts.values())} arrived"
    for request in receiver.received:
        assert request.body == sent[request.header("webhook-id")]
        Webhook(secret).verify(request.body, dict(request.headers))
    requests_seen = [
        {"headers": {name.lower(): value for name, value in one.headers}, "body": base64.b64encode(one.body).decode()}
        for one in receiver.received
    ]
    document = json.dumps({"secret": secret, "requests": requests_seen})
    accepted = subprocess.check_output(["node", "-e", VERIFY], input=document, text=True, cwd=packages)
    assert int(accepted) == len(sent)
    sizes = sorted(map(len, sent.values()))
    print(
        f"{len(sent)} payloads of {sizes[0]:,} to {sizes[-1]:,} bytes: each arrived once, byte for byte, "
        "its signature accepted by standardwebhooks for Python and for Node"
    )


if __name__ == "__main__":
    main()
