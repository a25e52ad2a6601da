"""Read the tables of cases and build the bytes they describe."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("WEBHOOKHUB_VECTORS") or Path(__file__).with_name("vectors"))


def load(name: str) -> dict[str, Any]:
    """The table in `<name>.json`, from the folder WEBHOOKHUB_VECTORS names or else from the copy beside the tests."""
    table: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return table


def build_bytes(spec: dict[str, Any]) -> bytes:
    """The bytes of a case: its `text`, `bytes_b64` or `gen`, each of them also spelled with the prefix `body_`."""
    for key, build in _BUILDERS.items():
        for name in (key, f"body_{key}"):
            if name in spec:
                return build(spec[name])
    raise KeyError(f"case {spec.get('id')} describes no bytes: none of {', '.join(_BUILDERS)}")


def _generate(gen: dict[str, Any]) -> bytes:
    match gen["op"]:
        case "fill":
            prefix, fill, suffix = (gen[part].encode() for part in ("prefix", "fill", "suffix"))
            room = gen["total_bytes"] - len(prefix) - len(suffix)
            return bytes(prefix + (fill * (room // len(fill) + 1))[:room] + suffix)
        case "nest":
            return str(gen["open"] * gen["depth"] + gen["inner"] + gen["close"] * gen["depth"]).encode()
        case "repeat":
            return str(gen["prefix"] + gen["unit"] * gen["count"] + gen["suffix"]).encode()
        case op:
            raise ValueError(f"unknown way to generate bytes: {op!r}")


_BUILDERS: dict[str, Callable[[Any], bytes]] = {
    "text": str.encode,
    "bytes_b64": base64.b64decode,
    "b64": base64.b64decode,
    "gen": _generate,
}
