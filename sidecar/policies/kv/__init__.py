"""Parts of `kv_affinity`, each usable alone.

clock: time in spans · footprint: tokens of a rank by when they were used · index: prefix blocks ->
ranks that hold them · queue: tokens that wait for prefill · engine: what schedulers really found ·
costs: what each rank costs the next request · spill: when to leave a cache · memory: all of it for
one SGLang instance.
"""
