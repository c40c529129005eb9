"""Loads from SGLang's own publisher, for ranks whose scheduler cannot have the hook.

It tells queues but acknowledges nothing: what was sent counts as in flight for a time of grace.
"""
