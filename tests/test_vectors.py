"""The copies of the tables under tests/vectors are the originals, wherever these are at hand."""

from pathlib import Path

import pytest

COPIES = Path(__file__).with_name("vectors")
ORIGINALS = Path(__file__).resolve().parents[2] / "shared" / "vectors"


@pytest.mark.skipif(not ORIGINALS.exists(), reason="the originals are not beside this clone")
def test_the_copies_equal_the_originals():
    originals = {path.name: path.read_bytes() for path in ORIGINALS.glob("*.json")}
    copies = {path.name: path.read_bytes() for path in COPIES.glob("*.json")}
    assert copies == originals
