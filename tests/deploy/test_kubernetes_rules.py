"""The monitoring overlay says what deploy/prometheus says: rules, jobs, the label `instance`."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import KUBERNETES, Object, container, pod_templates, ports, rendered

WRAP = KUBERNETES / "prometheusrule.sh"
PROMETHEUS = KUBERNETES.parent / "prometheus"
SCRAPE = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
NODE = "__meta_kubernetes_pod_label_leaderworkerset_sigs_k8s_io_"


def wrapped(*files: Path) -> str:
    command = ["/bin/sh", str(WRAP), *map(str, files)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def endpoints() -> dict[str, Object]:
    """Of the PodMonitor, by the job that it makes."""
    (monitor,) = (item for item in rendered("monitoring") if item["kind"] == "PodMonitor")
    found = {}
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        found[relabelled(endpoint, {})["job"]] = endpoint
    return found


def relabelled(endpoint: Object, labels: dict[str, str]) -> dict[str, str]:
    """Labels of a target after the endpoint's `relabelings`, action replace: relabel_config in
    Prometheus's documentation of its configuration."""
    labels = dict(labels)
    for rule in endpoint["relabelings"]:
        assert rule.get("action", "replace") == "replace"
        values = [labels.get(name, "") for name in rule.get("sourceLabels", [])]
        match = re.fullmatch(rule.get("regex", "(.*)"), rule.get("separator", ";").join(values))
        if match:
            template = rule.get("replacement", "$1").replace("$1", r"\1")
            labels[rule["targetLabel"]] = match.expand(template)
    return labels


def test_a_rule_file_is_wrapped_whole(tmp_path: Path) -> None:
    file = tmp_path / "some.rules.yml"
    rule = {"alert": "A", "expr": "up\n== 0", "for": "5m", "annotations": {"text": "it's\n\nlong"}}
    content: dict[str, Any] = {"groups": [{"name": "g", "rules": [rule]}]}
    file.write_text("# first line\n" + yaml.safe_dump(content, default_style="|"))
    made = yaml.safe_load(wrapped(file))
    assert made["kind"] == "PrometheusRule"
    assert made["metadata"]["name"] == "sglang-dp-sidecar-some"
    assert made["spec"] == content


def test_the_overlay_has_the_rules_that_prometheus_has() -> None:
    files = sorted(SCRAPE["rule_files"])
    ours = [item for item in rendered("monitoring") if item["kind"] == "PrometheusRule"]
    expected = list(yaml.safe_load_all(wrapped(*(PROMETHEUS / name for name in files))))
    paths = " ".join(f"deploy/prometheus/{name}" for name in files)
    again = f"deploy/kubernetes/{WRAP.name} {paths} > .../overlays/monitoring/prometheusrule.yaml"
    assert sorted(ours, key=str) == sorted(expected, key=str), f"make it again: {again}"


def test_jobs_are_those_that_the_rules_ask_for() -> None:
    jobs = {config["job_name"]: config for config in SCRAPE["scrape_configs"]}
    assert endpoints().keys() == jobs.keys()
    for name, endpoint in endpoints().items():
        assert endpoint.get("honorLabels", False) == jobs[name].get("honor_labels", False)


@pytest.mark.parametrize("pod, group", [("sglang-0", ""), ("sglang-3", "3"), ("sglang-3-1", "3")])
def test_sglangs_own_series_are_of_the_instance_that_the_hook_tells(pod: str, group: str) -> None:
    """A pod of `single-node`, then leader and worker of a group of `multi-node`."""
    labels = {"__meta_kubernetes_pod_name": pod}
    if group:
        labels |= {f"{NODE}name": "sglang", f"{NODE}group_index": group}
    instance = f"sglang-{group}" if group else pod  # as test_kubernetes_settings.py has it
    assert relabelled(endpoints()["sglang"], labels)["instance"] == instance


def test_only_the_sidecar_is_asked_for_our_metrics() -> None:
    sidecars = [
        name
        for overlay in ("single-node", "multi-node")
        for name, pod in pod_templates(overlay).items()
        for one in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]
        if endpoints()["sglang-dp-sidecar"]["port"] in ports(one)
    ]
    assert sidecars == ["pod", "leader"]
    worker = container(pod_templates("multi-node")["worker"], "sglang")
    assert endpoints()["sglang"]["port"] in ports(worker)
