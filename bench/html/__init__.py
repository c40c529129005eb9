"""The report of a bench: `result.json`, `rows.jsonl.gz` and the self-contained `report.html`."""

from bench.html.text import text_table
from bench.html.write import read_outcomes, write_report

__all__ = ["read_outcomes", "text_table", "write_report"]
