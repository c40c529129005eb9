"""An A/B on the running server: the policy is swapped between the arms and put back."""

from bench.live.ab import run_live
from bench.live.cells import Options
from bench.outcome import summarize
from bench.workloads import make_workload
from sidecar.control import Control
from sidecar.listener import control_path

GROUPS, PROMPTS = 6, 4
WORKLOAD = (
    f"gsp:num-groups={GROUPS}:prompts-per-group={PROMPTS}:system-prompt-len=1024:question-len=64"
    ":output-len=4:send-routing-key=true:concurrency=2"
)
OPTIONS = Options(burn_in=(256,), warm_up=(256,))


def test_two_policies_on_one_warm_server(live):
    control = Control(control_path(live.sidecar.endpoint))
    before = control.show()
    admin = f"http://127.0.0.1:{live.sidecar.port}"
    arms, workload = ["prefix_affinity", "sidecar_round_robin"], make_workload(WORKLOAD)
    outcomes = list(
        run_live(
            live.server.base_url,
            control,
            admin,
            workload,
            arms,
            [1],
            1,
            options=OPTIONS,
            tell=lambda text: None,
        )
    )
    places = []
    for outcome in outcomes:
        assert outcome.kind == "simulated"
        assert len(outcome.rows) == GROUPS * PROMPTS
        assert not [row.error for row in outcome.rows if row.error]
        assert all(row.rank >= 0 and row.cached_tokens >= 0 for row in outcome.rows)
        places.append(len({(row.session, row.rank) for row in outcome.rows}))
    affine, spread = outcomes
    assert places[0] == GROUPS, "every group stays on its rank"
    assert places[1] > GROUPS
    assert all(row.rank == row.preferred for row in affine.rows)
    assert summarize(affine)["reuse"] > summarize(spread)["reuse"]
    after = control.show()
    assert (after.name, after.params) == (before.name, before.params)
