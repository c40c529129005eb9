"""deploy/kubernetes: every overlay renders, fits the schemas, and keeps SGLang serving."""

import json
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from sidecar import __version__, config
from tests.deploy.manifests import (
    KUBERNETES,
    OVERLAYS,
    WITH_SGLANG,
    Object,
    container,
    containers,
    every_container,
    pod_templates,
    ports,
    rendered,
)

OLDEST, NEWEST = "1.29", "1.37"
"""Native sidecars are on by default since 1.29; the newest that kubernetes-validate knows."""
CUSTOM = {"LeaderWorkerSet", "PodMonitor", "PrometheusRule"}
SCHEMAS = KUBERNETES.parents[1] / "tests" / "deploy" / "schemas"
EVERY_POD = [(overlay, name) for overlay in WITH_SGLANG for name in pod_templates(overlay)]
EVERY_CONTAINER = [pytest.param(one, id=name) for name, one in every_container()]


def fits(item: Object, version: str) -> None:
    """Raises the validators' errors."""
    if item["kind"] in CUSTOM:
        schema = json.loads((SCHEMAS / f"{item['kind'].lower()}.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).validate(item)
    else:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_its_schema(overlay: str, version: str) -> None:
    items = rendered(overlay)
    assert items
    for item in items:
        fits(item, version)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("overlay, name", EVERY_POD)
def test_every_pod_template_is_a_pod(overlay: str, name: str, version: str) -> None:
    template = pod_templates(overlay)[name]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
    fits(pod, version)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_misspelt_field_would_be_found(overlay: str) -> None:
    for item in rendered(overlay):
        if "spec" in item:
            with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
                fits({**item, "spec": {**item["spec"], "replicsa": 1}}, NEWEST)


@pytest.mark.parametrize("one", EVERY_CONTAINER)
def test_images_are_pinned(one: Object) -> None:
    name, _, tag = one["image"].rpartition(":")
    assert name
    assert tag.split("-")[-1] == __version__


@pytest.mark.parametrize("overlay, name", EVERY_POD)
def test_one_user_without_rights(overlay: str, name: str) -> None:
    spec = pod_templates(overlay)[name]["spec"]
    rights = spec["securityContext"]
    assert rights["runAsNonRoot"]
    assert rights["runAsUser"] == rights["runAsGroup"] == rights["fsGroup"] > 0
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for one in containers(pod_templates(overlay)[name]):
        # Nothing here overrides the user: the sockets are mode 0600.
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("overlay, name", EVERY_POD)
def test_every_mount_has_its_volume(overlay: str, name: str) -> None:
    pod = pod_templates(overlay)[name]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    mounted = {mount["name"] for one in containers(pod) for mount in one["volumeMounts"]}
    assert mounted == volumes


def test_the_sockets_are_in_shared_memory() -> None:
    pod = pod_templates("single-node")["pod"]
    directory = config.Config().serve.endpoint.removeprefix("ipc://").rpartition("/")[0]
    for one in containers(pod):
        assert {"name": "sockets", "mountPath": directory} in one["volumeMounts"]
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "sockets")
    assert volume["emptyDir"]["medium"] == "Memory"


def test_the_sidecar_is_a_native_one_that_nothing_waits_for() -> None:
    pod = pod_templates("single-node")["pod"]
    assert [one["name"] for one in pod["spec"]["initContainers"]] == ["dp-sidecar"]
    sidecar = container(pod, "dp-sidecar")
    assert sidecar["restartPolicy"] == "Always"
    assert "startupProbe" not in sidecar, "SGLang would not start before the sidecar is up"
    assert "readinessProbe" not in sidecar, "the pod would leave the Service with the sidecar"
    assert "cpu" not in sidecar["resources"]["limits"], "a throttled sidecar misses its deadline"
    assert sidecar["resources"]["requests"]["cpu"]


def test_no_restart_of_the_sidecar_recreates_the_group() -> None:
    (workers,) = (i for i in rendered("multi-node") if i["kind"] == "LeaderWorkerSet")
    template = workers["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    for pod in pod_templates("multi-node").values():
        assert [one["name"] for one in containers(pod)] == ["sglang"]
    leader = container(pod_templates("multi-node")["leader"], "sglang")
    assert (leader["command"], leader["args"][0]) == (["sglang-dp-sidecar"], "run")


def test_probes_ask_where_somebody_listens() -> None:
    admin = config.Config().admin.port
    for name, one in every_container():
        probes: list[Any] = [one[key] for key in one if key.endswith("Probe")]
        for probe in probes:
            assert probe["httpGet"]["port"] in ports(one), name
        if one["name"] == "dp-sidecar":
            assert ports(one) == {"dp-sidecar": admin}
            assert one["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "dp-sidecar"}
        else:
            assert f"--port={ports(one)['http']}" in one["args"]
            assert {probe["httpGet"]["path"] for probe in probes} == {"/health"}
    leader = container(pod_templates("multi-node")["leader"], "sglang")
    assert ports(leader)["dp-sidecar"] == admin


def test_services_and_monitor_select_our_pods() -> None:
    for overlay in WITH_SGLANG:
        (service,) = (i for i in rendered(overlay) if i["kind"] == "Service")
        labels = {"leaderworkerset.sigs.k8s.io/name": "sglang"}  # those of its controller
        labels["leaderworkerset.sigs.k8s.io/worker-index"] = "0"
        first = next(iter(pod_templates(overlay).values()))
        labels |= first["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        (monitor,) = (i for i in rendered("monitoring") if i["kind"] == "PodMonitor")
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        names = {name for one in containers(first) for name in ports(one)}
        assert {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]} <= names


def test_a_changed_setting_does_not_replace_the_pod() -> None:
    (settings,) = (i for i in rendered("single-node") if i["kind"] == "ConfigMap")
    assert settings["metadata"]["name"] == "dp-sidecar"


def test_both_nodes_of_a_group_start_one_server() -> None:
    leader, worker = (container(pod, "sglang") for pod in pod_templates("multi-node").values())
    server = leader["args"][leader["args"].index("--") + 1 :]
    assert server == worker["args"]
    assert leader["resources"] == worker["resources"]
