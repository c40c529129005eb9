"""Runs inside SGLang's processes: asks the sidecar for ranks, reports load; inert by default."""
