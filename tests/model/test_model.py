"""The model of the whole, searched by hypothesis, once for each policy that a server starts with.

The same runs each time here. `MODEL_EXAMPLES=20000` searches for long, and anew.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.draws import POLICIES
from tests.model.machine import Model
from tests.model.mutations import MUTATIONS, caught

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "0"))
PROFILE = settings(
    max_examples=EXAMPLES or 15,
    stateful_step_count=60 if EXAMPLES else 30,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(0 if EXAMPLES else 300)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_invariants_hold(policy: str) -> None:
    machine = type(f"Model of {policy}", (Model,), {"policy": policy})
    run_state_machine_as_test(machine, settings=PROFILE)


@pytest.mark.parametrize(
    "name",
    [
        "an assignment is not counted",
        "a retracted assignment stays counted",
        "a local decision is not remembered",
        "kv_affinity does not know keys",
    ],
)
def test_the_model_can_fail(name: str) -> None:
    """Some of the mutations, those that are found within seconds."""
    assert "AssertionError" in caught(MUTATIONS[name])
