"""Faults under load with real processes of ours, one after another; `python -m bench.chaos`."""
