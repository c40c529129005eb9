"""Entry point of the group `sglang.srt.plugins`. Standard library only: SGLang loads every
installed plugin in each of its processes, and a process that does not use this one pays nothing.
"""

import os

ENABLED_BY = "DP_SIDECAR_ENDPOINT"


def register() -> None:
    """Attach to the SGLang of this process if DP_SIDECAR_ENDPOINT is set; never raises."""
    if not os.environ.get(ENABLED_BY):
        return
    try:
        from sglang_hook import patches

        patches.install()
    except Exception:
        import logging

        logging.getLogger("sglang_hook").exception(
            "dp_sidecar: ERROR: could not attach; SGLang dispatches as without it"
        )
