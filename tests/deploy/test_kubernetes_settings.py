"""deploy/kubernetes: what the manifests say is what sidecar and hook understand."""

import re
from pathlib import Path

import pytest
import zmq

from sglang_hook import settings as hook
from sidecar import config, wire
from sidecar.cli import parser
from sidecar.keygen import keygen
from tests.deploy.manifests import (
    Object,
    container,
    environment,
    every_container,
    pod_templates,
    rendered,
)
from tests.processes import free_port, short_directory, sidecar_process, wait_for
from tests.support import report

SIDECARS = [
    pytest.param(one, id=name)
    for name, one in every_container()
    if one["args"][0] in ("serve", "run")
]
HOOKS = [pytest.param(one, id=name) for name, one in every_container() if "env" in one]


def flags_of(one: Object) -> dict[str, str]:
    """The sidecar's flags as its own parser reads them."""
    arguments = vars(parser().parse_args(one["args"]))
    return {name: value for name, value in arguments.items() if name[:2] == "--" and value}


@pytest.mark.parametrize("one", SIDECARS)
def test_every_flag_is_one_of_ours(one: Object) -> None:
    settings = config.load(None, {}, flags_of(one))
    assert settings.admin.host == "0.0.0.0"
    assert settings.serve.endpoint == config.Config().serve.endpoint


def test_the_settings_file_is_valid(tmp_path: Path) -> None:
    (item,) = (i for i in rendered("single-node") if i["kind"] == "ConfigMap")
    sidecar = container(pod_templates("single-node")["pod"], "dp-sidecar")
    (path,) = re.findall(r"--config=(\S+)", " ".join(sidecar["args"]))
    file = tmp_path / Path(path).name
    file.write_text(item["data"][file.name])
    assert config.load(file, {}, {}) == config.Config()


@pytest.mark.parametrize("one", HOOKS)
def test_the_hook_knows_every_variable(one: Object) -> None:
    ours = [name for name in environment(one) if name.startswith(hook.ENV_PREFIX)]
    assert "DP_SIDECAR_ENDPOINT" in ours
    known = {hook.ENV_PREFIX + name.upper() for name in hook.Settings.__struct_fields__}
    assert set(ours) <= known


def test_the_whole_group_is_one_instance() -> None:
    leader, worker = (
        environment(container(pod, "sglang")) for pod in pod_templates("multi-node").values()
    )
    assert leader["DP_SIDECAR_INSTANCE"]["value"] == "$(GROUP_SET)-$(GROUP_INDEX)"
    for name in ("GROUP_SET", "GROUP_INDEX", "DP_SIDECAR_INSTANCE"):
        assert leader[name] == worker[name]
    # A variable may use those before it in the list.
    assert list(worker).index("GROUP_INDEX") < list(worker).index("DP_SIDECAR_INSTANCE")


def here(text: str, directory: Path, port: int) -> str:
    """A manifest's value on this machine: the leader is at 127.0.0.1, the Secret in `directory`."""
    text = text.replace("/etc/sglang-dp-sidecar/curve", str(directory))
    text = text.replace("$(LWS_LEADER_ADDRESS)", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
    return text.replace(":9478", f":{port}")


def leader_flags(directory: Path, port: int) -> list[str]:
    """Those about keys and TCP."""
    flags = flags_of(container(pod_templates("multi-node")["leader"], "sglang"))
    ours = [name for name in flags if name.startswith(("--curve", "--reports"))]
    assert len(ours) == 3
    return [f"{name}={here(flags[name], directory, port)}" for name in ours]


def worker_settings(directory: Path, port: int) -> hook.Settings:
    """What the hook on a worker reads, the Secret's key included."""
    variables = {}
    entries = environment(container(pod_templates("multi-node")["worker"], "sglang"))
    for name, entry in entries.items():
        if "value" in entry:
            variables[name] = here(entry["value"], directory, port)
        elif "secretKeyRef" in entry["valueFrom"]:
            key = entry["valueFrom"]["secretKeyRef"]["key"]
            variables[name] = (directory / key).read_text()
    return hook.load(variables)


def test_reports_of_a_worker_arrive_with_the_keys_of_keygen() -> None:
    with short_directory() as directory:
        folder, port = directory / "keys", free_port()
        keygen(str(folder))
        worker = worker_settings(folder, port)
        keys = worker.keys()
        assert keys is not None
        with (
            sidecar_process(f"ipc://{directory}/q", *leader_flags(folder, port)) as sidecar,
            zmq.Context() as context,
            context.socket(zmq.PUSH) as push,
        ):
            push.linger = 0
            keys.apply(push)
            push.connect(worker.reports)
            push.send(wire.encode(report(instance=worker.instance)))
            wait_for(lambda: sidecar.metric("load_reports_total"))
