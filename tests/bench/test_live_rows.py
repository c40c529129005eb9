from bench.live.rows import Journal, idle_share
from bench.outcome import Sample


def test_journals_of_both_forms(tmp_path):
    path = tmp_path / "journal"
    path.write_text("old\t1\t5\n")
    journal = Journal(str(path))
    with path.open("a") as lines:
        lines.write("a\t3\nb\t2\t640\n")
    assert journal.read() == {"a": (3, -1), "b": (2, 640)}
    assert Journal("").read() == {}
    assert Journal(str(tmp_path / "none")).read() == {}


def test_idle_share_of_samples():
    busy = [Sample(0.0, [1, 0]), Sample(0.1, [0, 0])] * 20
    assert idle_share(busy) == 0.5
    assert idle_share(busy[:20]) is None
