"""Inputs to begin with."""

from sidecar.journal import record
from tests.fuzz.journal_side import chunk, encode, framed, head
from tests.fuzz.source import Source
from tests.test_wire import GOLDEN


def seeds(name: str) -> list[bytes]:
    """Golden messages, and a file that holds a head only."""
    golden = {key: bytes.fromhex(text) for key, (_, _, text) in GOLDEN.items()}
    quiet = Source(b"")
    whole = {
        "query": [golden["query"], golden["minimal query"]],
        "report": [golden["load report"]],
        "answer": [golden["reply"], golden["refusal"]],
        "journal": [record.MAGIC + chunk(framed(encode(head(quiet))), quiet)],
        "settings": [b"\0\0\0\0[policy]\nname = 'kv_affinity'\n"],
    }
    return [*whole.get(name, []), bytes(range(256)), bytes(64)]
