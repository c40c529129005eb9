"""Every input that is kept, through its target; and what the corpus may take."""

import contextlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.errors import PeerError
from tests.fuzz import CORPUS
from tests.fuzz.mutate import WHOLE, mutator
from tests.fuzz.seeds import seeds
from tests.fuzz.source import Source, bent
from tests.fuzz.targets import TARGETS
from tests.test_wire import GOLDEN

ROOT = Path(__file__).parents[2]
FILES = sorted(file for file in CORPUS.glob("*/*") if file.is_file())


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_kept(name: str) -> None:
    kept = [file for file in FILES if file.parent.name == name]
    assert kept, f"{name}: make fuzz TARGET={name}, then python -m tests.fuzz --merge"
    for data in [*seeds(name), b"", *(file.read_bytes() for file in kept)]:
        TARGETS[name].run(data)


def test_the_corpus_is_small() -> None:
    assert {file.parent.name for file in FILES} == TARGETS.keys()
    assert len(FILES) < 300
    assert sum(file.stat().st_size for file in FILES) < 1 << 20


def test_an_input_means_the_same_every_time() -> None:
    data = bytes(range(256)) * 2
    one, other = Source(data), Source(data)
    values = [(one.count(), one.wild(), one.text(), bent(b"abcdef", one)) for _ in range(20)]
    assert values == [
        (other.count(), other.wild(), other.text(), bent(b"abcdef", other)) for _ in range(20)
    ]


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_the_mutator_keeps_messages_messages(name: str) -> None:
    mutate = mutator(lambda data, most: data)
    decode = GOLDEN[{"query": "query", "report": "load report", "answer": "reply"}[name]][1]
    data = seeds(name)[0]
    changed = {mutate(data, 512, seed) for seed in range(300)}
    assert len(changed) > 50
    assert max(map(len, changed)) <= 512
    valid = 0
    for one in changed:
        with contextlib.suppress(PeerError):
            decode(one)
            valid += 1
    assert 0.1 < valid / len(changed) < 0.95


def test_the_mutator_leaves_other_bytes_alone() -> None:
    mutate = mutator(lambda data, most: data + b"!")
    assert {mutate(b"\xc1", 512, seed) for seed in range(100)} == {b"\xc1!"}


@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="atheris: make fuzz")
def test_atheris_runs_a_target(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--runs", "300", "--target", "telemetry"]
    ran = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\| telemetry \| 3\d\d \|.*\| ok \|", ran.stdout), ran.stdout


def test_the_extra_is_what_make_installs() -> None:
    wanted = re.search(r'"(atheris==[\d.]+);', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None
    assert wanted[1] in (ROOT / "Makefile").read_text()
