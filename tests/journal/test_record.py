"""The format: what older versions have written must be read for ever."""

from sidecar.journal.record import (
    FIGURES,
    FORMAT,
    MAGIC,
    Changed,
    Decided,
    Forget,
    Gap,
    Head,
    Part,
    Record,
    Reported,
    Said,
    State,
    Told,
    decode,
    encode,
)
from sidecar.wire import LoadReport, Want
from tests.support import report

SAID = Said(b"12345678", 1, 2, None, -1, b"abcdefgh", 3, 4)
STATE = State("round_robin", {"a": 1}, 2, Want(1), "kv_affinity", {}, 0.5, "total_tokens")
GOLDEN: dict[str, Record] = {
    (
        "9ca468656164a3302e3107cb401400000000000040a26162cb3ff8000000000000cb400400000000"
        "000009c398ab726f756e645f726f62696e81a16101029601c200000000ab6b765f616666696e6974"
        "7980cb3fe0000000000000ac746f74616c5f746f6b656e739192cb3ff0000000000000dc0013a46c"
        "6f616401aa686f73743a333030303001010100000000000000000000000000"
    ): Head("0.1", 7, 5.0, 64, "ab", 1.5, 2.5, 9, True, STATE, [(1.0, report(1))]),
    (
        "93a470617274919398c40831323334353637380102c0ffc4086162636465666768030401029198c4"
        "0831323334353637380102c0ffc40861626364656667680304"
    ): Part([Told(SAID, 1, 2)], [SAID]),
    (
        "9ea5717565727905a169010203910091019102909198c40831323334353637380102c0ffc4086162"
        "6364656667680304910091a6706c616365649100"
    ): Decided(5, "i", 1, 2, 3, [0], [1], [2], [], [SAID], [0], ["placed"], [0]),
    "9ea57175657279cb3ff8000000000000a1690102c0c0c0c09090909090": Decided(
        1.5, "i", 1, 2, None, None, None, None, [], [], [], [], []
    ),
    "96a46c6f616405a16903019201fe": Reported(5, "i", 3, 1, [1, -2]),
    (
        "94a66368616e676505a373657498ab726f756e645f726f62696e81a16101029601c200000000ab6b"
        "765f616666696e69747980cb3fe0000000000000ac746f74616c5f746f6b656e73"
    ): Changed(5, "set", STATE),
    "94a3676170050ca46469736b": Gap(5, 12, "disk"),
    "91a6666f72676574": Forget(),
}


def test_records_are_golden() -> None:
    assert MAGIC == b"sglang-dp-sidecar decision log, format 1\n" and FORMAT == 1
    for data, record in GOLDEN.items():
        assert encode(record).hex() == data
        assert decode(bytes.fromhex(data)) == record


def test_what_a_newer_version_appends_is_skipped() -> None:
    gap = encode(Gap(5, 12, "disk"))
    longer = bytes([gap[0] + 2]) + gap[1:] + b"\x01\xa1x"
    assert decode(longer) == Gap(5, 12, "disk")


def test_a_load_report_counts_nothing_but_numbers() -> None:
    """They are told as differences."""
    assert LoadReport.__struct_fields__[:3] == ("version", "instance", "rank")
    assert all(type(getattr(report(), name)) is int for name in FIGURES)
