"""Dispatcher for SGLang's data-parallel ranks: the daemon and its pure policy core."""

__version__ = "0.1.0"
