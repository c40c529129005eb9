"""How each command of the pages is run. A command that is in no table here fails test_commands.py,
and so does one here that no page has any more."""

RUN = {
    "curl -s localhost:9477/status": '"policy_version"',
    "curl -s localhost:9477/paths": '"reason":"placed"',
    "sglang-dp-sidecar check": "0 problems",
    "sglang-dp-sidecar config": "\nendpoint = ",
    "sglang-dp-sidecar top --once": "kv_affinity version",
    "sglang-dp-sidecar policy show": '"name": "kv_affinity"',
    "sglang-dp-sidecar policy list": r"max_load_skew = 1.5, .*1",
    "sglang-dp-sidecar policy set prefix_affinity --max-load-skew 2 --min-load-gap 8": (
        r'"max_load_skew": 2(.|\n)*"min_load_gap": 8'
    ),
    "sglang-dp-sidecar policy set kv_affinity": '"name": "kv_affinity"',
    "sglang-dp-sidecar policy shadow kv_affinity --move-tokens 8192": '"move_tokens": 8192',
    "sglang-dp-sidecar policy shadow off": '"shadow": null',
    "sglang-dp-sidecar policy canary total_requests --share 0.05": '"share": 0.05',
    "sglang-dp-sidecar policy canary off": '"canary": null',
    "sglang-dp-sidecar policy reload": '"name": "kv_affinity"',
    "sglang-dp-sidecar policy history": "start",
    "curl --unix-socket /run/sglang-dp-sidecar/query.sock.control http://sidecar/policy": '"name":',
    "curl --unix-socket /run/sglang-dp-sidecar/query.sock.control http://sidecar/policy"
    """ -d '{"name": "round_robin", "params": {}}'""": '"name":"round_robin"',
    "curl --unix-socket /run/sglang-dp-sidecar/query.sock.control http://sidecar/path"
    """ -d '{"key": "KEY"}'""": r"\[",
    "sglang-dp-sidecar policy show --url http://HOST:9477"
    " --admin-token-file /etc/sglang-dp-sidecar/token": '"name": "(round_robin|kv_affinity)"',
    "sglang-dp-sidecar policy set total_requests": '"name": "total_requests"',
    "sglang-dp-sidecar replay /var/lib/sglang-dp-sidecar/decisions": "",
    "sglang-dp-sidecar replay /var/lib/sglang-dp-sidecar/decisions"
    " --policy prefix_affinity min_load_gap=8": "prefix_affinity",
    "sglang-dp-sidecar explain /var/lib/sglang-dp-sidecar/decisions --key KEY": "placed",
    "sglang-dp-sidecar explain /var/lib/sglang-dp-sidecar/decisions --at 1764489600-17": "placed",
    "sglang-dp-sidecar keygen keys": "sidecar.key_secret",
    "ssh -L 9477:localhost:9477 HOST": "localforward",
}
"""Beside a running sidecar: the command, and what its output matches."""

IN_A_TERMINAL = (
    "sglang-dp-sidecar top",
    "sglang-dp-sidecar top --url http://localhost:9477 --interval 2",
)
"""Until `q` is pressed."""

SERVING = (
    "sglang-dp-sidecar serve",
    "sglang-dp-sidecar serve --config sidecar.toml &",
    "sglang-dp-sidecar serve --take-over",
    "python -m sidecar serve --take-over",
    "sglang-dp-sidecar serve --decision-log-directory=/var/lib/sglang-dp-sidecar/decisions",
    "sglang-dp-sidecar serve --reports-tcp=tcp://10.0.0.1:9478"
    " --curve-secret-key-file=keys/sidecar.key_secret --curve-client-keys-file=keys/hook.key",
)
"""Until they are stopped: each answers a query, and ends with 0."""

BESIDE_A_STAND_IN = {
    "sglang-dp-sidecar run -- --model-path MODEL --tp-size 8 --dp-size 8 --enable-dp-attention": (
        "--model-path MODEL --tp-size 8 --dp-size 8 --enable-dp-attention"
    ),
    "DP_SIDECAR_ENDPOINT=ipc:///run/sglang-dp-sidecar/query.sock"
    " python -m sglang.launch_server ...": "...",
    "python -m sglang.launch_server": "",
}
"""They start SGLang on GPUs: run with a stand-in of that name. The command, and what it is told."""

IN_A_CHECKOUT = (
    "pip install '.[daemon]'",
    "pip install .",
    "pip wheel --no-deps --wheel-dir dist .",
    "pip install --no-deps dist/sglang_dp_sidecar-*.whl",
    "python3 -m venv /opt/sglang-dp-sidecar",
    '/opt/sglang-dp-sidecar/bin/pip install "$(ls dist/sglang_dp_sidecar-*.whl)[daemon]"',
    "install -D -m 0644 deploy/config/sidecar.toml /etc/sglang-dp-sidecar/sidecar.toml",
    "install -D -m 0644 -t /etc/systemd/system deploy/systemd/sglang-dp-sidecar.service",
    "install -D -m 0644 -t /etc/systemd/system/sglang.service.d"
    " deploy/systemd/sglang.service.d/10-dp-sidecar.conf",
)
"""In a copy of the checkout, in this order. pip fetches nothing and installs here nothing."""

NEWCOMER = (
    ".venv/bin/sglang-dp-sidecar run --server-module bench.simulated.server"
    " -- --dp-size 4 --port 30000 --log-level info",
    "curl -s localhost:30000/v1/chat/completions -H 'content-type: application/json'"
    """ -H 'x-smg-routing-key: me' -d '{"model": "simulated", "messages": [{"role": "user","""
    """ "content": "'"$(seq -s ' ' 500)"'"}], "max_tokens": 8}'""",
    "curl -s localhost:9477/paths",
    ".venv/bin/sglang-dp-sidecar top",
)
"""What README.md has a newcomer type, run by test_newcomer.py."""

BY_MAKE = (
    "make demo",
    "make demo JSON=result.json",
    "make venv",
    "make test",
    "make bench",
    "make bench TARGET=http://localhost:30000",
)
"""Minutes each: make says what it would start, and that knows the flags. What they are made of is
tested in tests/bench and tests/integration."""

BENCHES = (
    "python -m bench.replace",
    "python -m bench.journal",
    "python -m bench.published",
    "python -m bench.sim --workload W --arm kv_affinity --arm ... --seeds 5 --first-seed 5",
    "python -m bench.ablation --seeds 3",
)
"""Minutes each: the module knows the flags."""

NAMED = (
    "sglang-dp-sidecar run",
    "sglang-dp-sidecar replay",
    "sglang-dp-sidecar explain",
    "sglang-dp-sidecar policy set",
    "sglang-dp-sidecar policy set NAME --param VALUE ...",
    "sglang-dp-sidecar policy shadow NAME",
    "sglang-dp-sidecar policy canary NAME --share 0.05",
)
"""Names of verbs or patterns, not commands to be typed: the verb is there."""

UNITS = (
    "systemctl daemon-reload",
    "systemctl enable --now sglang-dp-sidecar",
    "systemctl restart sglang",
    "systemctl edit sglang-dp-sidecar",
    "systemctl reload sglang-dp-sidecar",
)
"""They need systemd as process 1: the units are there; see tests/deploy/test_systemd.py."""

_DEPLOY = "tests/deploy/test_deploy_doc.py::"
_KUBERNETES = "tests/deploy/test_kubernetes.py::test_every_object_fits_its_schema"

ELSEWHERE = {
    # What somebody greps for is in SGLang's log, once a process.
    "grep dp_sidecar sglang.log": "tests/integration/test_live.py::"
    "test_the_log_holds_one_line_of_ours_a_process_and_no_error",
    "grep dp_sidecar": "tests/integration/test_live.py::"
    "test_the_log_holds_one_line_of_ours_a_process_and_no_error",
    # Need two servers.
    "python -m sglang_router.launch_router --policy manual"
    " --worker-urls http://HOST1:30000 http://HOST2:30000": "tests/integration/test_gateway.py::"
    "test_the_key_passes_and_each_sidecar_decides_with_it",
    # Signals.
    "kill -HUP": "tests/test_run.py::test_sighup_reloads_the_sidecar",
    "kill -USR2 PID": "tests/test_takeover_run.py::"
    "test_sigusr2_replaces_the_sidecar_and_not_the_server",
    "kill -USR2 $(systemctl show -p MainPID --value sglang-dp-sidecar)": "tests/"
    "test_takeover_signal.py::test_systemd_is_told_whom_to_follow",
    # Needs systemd-analyze and the unit as a file.
    "systemd-analyze security sglang-dp-sidecar": "tests/deploy/test_systemd.py::"
    "test_exposure_is_low",
    # Need a Docker daemon and images of gigabytes: their steps are run without it.
    "docker build -f deploy/container/Dockerfile -t sglang-dp-sidecar:0.1.0 .": "tests/deploy/"
    "test_container_install.py::test_it_serves_and_its_health_check_sees_it",
    "docker build -f deploy/container/sglang-hook.Dockerfile -t sglang-with-hook:v0.5.23-0.1.0 .": (
        "tests/deploy/test_container_install.py::test_the_hook_installs_into_an_sglang_environment"
    ),
    "docker run -d --read-only --cap-drop ALL -v /run/sglang-dp-sidecar:/run/sglang-dp-sidecar"
    " sglang-dp-sidecar:0.1.0": "tests/deploy/test_container_install.py::"
    "test_it_serves_and_its_health_check_sees_it",
    "docker run -d --gpus all --user 10001:10001 -v /run/sglang-dp-sidecar:/run/sglang-dp-sidecar"
    " -e DP_SIDECAR_ENDPOINT=ipc:///run/sglang-dp-sidecar/query.sock"
    " sglang-with-hook:v0.5.23-0.1.0 python3 -m sglang.launch_server ...": _DEPLOY
    + "test_overlays_and_images_are_the_manifests",
    "docker run --init": "tests/test_run.py::test_nothing_is_left_when_run_is_killed",
    # Needs root, and makes what the sidecar makes itself where it may.
    "install -d -o 10001 -g 10001 -m 0700 /run/sglang-dp-sidecar": "tests/deploy/"
    "test_container.py::test_the_sidecar_runs_without_rights",
    # Needs a package index; what it wrote is checked.
    "uv pip compile --universal --python-version 3.10 --generate-hashes --extra daemon"
    " --no-annotate pyproject.toml -o deploy/container/requirements.txt": "tests/deploy/"
    "test_container.py::test_requirements_are_those_of_the_daemon",
    # Needs a public database.
    "make audit": "tests/deploy/test_container.py::test_what_is_audited_is_what_is_installed",
    # Need a cluster: kubectl renders what they would apply, and that is checked.
    "kubectl apply -k deploy/kubernetes/overlays/single-node": _KUBERNETES,
    "kubectl apply -k deploy/kubernetes/overlays/multi-node": _KUBERNETES,
    "kubectl apply -k deploy/kubernetes/overlays/monitoring": _KUBERNETES,
    "kubectl create secret generic dp-sidecar-curve --from-file=keys/sidecar.key_secret"
    " --from-file=keys/hook.key": _DEPLOY + "test_the_secrets_hold_what_the_pods_read",
    "kubectl create secret generic dp-hook-curve --from-file=keys/hook.key_secret"
    " --from-file=keys/sidecar.key": _DEPLOY + "test_the_secrets_hold_what_the_pods_read",
    "kubectl exec sglang-0 -c dp-sidecar -- sglang-dp-sidecar policy reload": _DEPLOY
    + "test_our_own_commands_parse",
    "deploy/kubernetes/prometheusrule.sh deploy/prometheus/alerts.yml"
    " deploy/prometheus/recording.yml"
    " > deploy/kubernetes/overlays/monitoring/prometheusrule.yaml": "tests/deploy/"
    "test_kubernetes_rules.py::test_the_overlay_has_the_rules_that_prometheus_has",
}
"""Run by another test, or standing for what it runs: its node id."""

TABLES = (
    RUN,
    IN_A_TERMINAL,
    SERVING,
    BESIDE_A_STAND_IN,
    IN_A_CHECKOUT,
    NEWCOMER,
    BY_MAKE,
    BENCHES,
    NAMED,
    UNITS,
    ELSEWHERE,
)
