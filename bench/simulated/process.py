"""Importing this module puts the simulated scheduler in the place of SGLang's.

It must come before plugins patch methods of the class, in every process. So the entry module
`bench.simulated.serve`, which spawned children import first, imports it at its top.
"""

from typing import Any

from sglang.srt.managers import scheduler as real

from bench.simulated.scheduler import SimulatedScheduler

real.Scheduler = SimulatedScheduler


def run_simulated_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's own `run_scheduler_process`, pickled by a name whose import does the above."""
    real.run_scheduler_process(*args, **kwargs)
