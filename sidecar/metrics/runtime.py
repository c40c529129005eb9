"""What the process takes, as every Prometheus client tells it: memory, CPU, descriptors."""

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

_REGISTRY = CollectorRegistry()
ProcessCollector(registry=_REGISTRY)


def runtime_exposition() -> bytes:
    """`process_...`, read from /proc; 0.1 ms."""
    return generate_latest(_REGISTRY)
