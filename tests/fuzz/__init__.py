"""Fuzz targets: functions of bytes that raise where a promise is broken.

`python -m tests.fuzz` drives them by coverage (atheris), test_corpus.py with the inputs kept in
corpus/, test_structured.py with hypothesis.
"""

from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
TIMEOUT = 25
"""Seconds for one input (libFuzzer), far over what any takes: a hang, on a busy machine too."""
MEMORY_MIB = 1024
"""Of a process that fuzzes: most of it is libFuzzer's own corpus."""
