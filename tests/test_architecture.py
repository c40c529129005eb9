"""The layout of the packages: who may import whom, and what may not occur at all."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module imports from lower layers only; modules of one layer do not know one another.
LAYERS = (
    {"errors"},
    {"wire", "logs", "orders", "notify", "curve", "keygen", "aside", "awake", "trust", "ceiling"},
    {"hashing", "gate", "loads", "files"},
    {"sockets", "control"},
    {"budget", "listener", "tokens"},
    {"policies", "published", "takeover"},
    {"seat", "tally"},
    {"canary", "catalog", "shadow", "keyhash"},
    {"dispatcher", "config", "paths"},
    {"metrics", "web", "aftermath"},
    {"steering", "complaints"},
    {"verbs", "journal", "guests", "feed"},
    {"admin", "service"},
    {"pump", "sites"},
    {"vigil"},
    {"server", "run", "top", "check", "policy_cli"},
    {"journal_cli"},
    {"cli"},
    {"entry"},
    {"__main__"},
)
PURE = (
    *("errors", "wire", "hashing", "loads", "budget", "policies"),
    *("seat", "tally", "canary", "shadow", "dispatcher"),
)
IMPURE = {
    *("zmq", "asyncio", "time", "random", "prometheus_client", "uvloop", "aiohttp", "os"),
    *("socket", "threading", "multiprocessing", "subprocess", "secrets", "datetime"),
}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile"}


MAY_NAME_SGLANG = {"patches.py", "controller_seam.py", "scheduler_seam.py", "reading.py"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


EVERY_SOURCE = sources("sidecar") + sources("sglang_hook")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Every imported module, late and conditional imports too; `from a import b` is `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path: Path) -> str:
    """`budget` of sidecar/budget.py, `policies` of anything in sidecar/policies/."""
    return path.relative_to(ROOT / "sidecar").with_suffix("").parts[0]


def layer_of(module: str) -> int:
    found = [number for number, modules in enumerate(LAYERS) if module in modules]
    assert found, f"sidecar/{module}: give it a layer in this test"
    return found[0]


@pytest.mark.parametrize("path", sources("sidecar"), ids=name_of)
def test_dependencies_point_one_way(path: Path) -> None:
    own = module_of(path)
    if own == "__init__":
        assert not [name for name in imports(path) if name.startswith("sidecar")]
        return
    for imported in imports(path):
        package, _, rest = imported.partition(".")
        assert package != "sglang_hook", f"{path.name} imports {imported}"
        module = rest.partition(".")[0]
        if package != "sidecar" or module == "__version__":
            continue
        within = own == module  # of one package
        assert within or layer_of(module) < layer_of(own), f"{own} imports {imported}"


def is_pure(path: Path) -> bool:
    published = module_of(path) == "published" and path.name != "subscriber.py"
    return published or module_of(path) in PURE


@pytest.mark.parametrize("path", [*filter(is_pure, sources("sidecar"))], ids=name_of)
def test_core_is_pure(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imports(path)} & IMPURE


def test_core_is_pure_in_what_it_loads() -> None:
    loaded = fresh_modules("import sidecar.dispatcher")
    assert not loaded & {"zmq", "asyncio", "prometheus_client", "uvloop", "aiohttp", "sglang"}


@pytest.mark.parametrize("path", sources("sglang_hook"), ids=name_of)
def test_hook_shares_little_with_the_sidecar(path: Path) -> None:
    allowed = {"wire", "hashing", "errors", "curve", "trust", "__version__"}
    used = {n.split(".")[1] for n in imports(path) if n.partition(".")[0] == "sidecar"}
    assert used <= allowed


@pytest.mark.parametrize("path", EVERY_SOURCE, ids=name_of)
def test_names_of_sglang_stand_in_few_files(path: Path) -> None:
    text = path.read_text()
    name = name_of(path)
    if name in (
        "sglang_hook/patches.py",
        "sglang_hook/front.py",
        "sglang_hook/controller_seam.py",
        "sglang_hook/scheduler_seam.py",
        "sglang_hook/reading.py",
    ):
        return
    assert not [n for n in imports(path) if n.partition(".")[0] == "sglang"]
    if name in ("sglang_hook/plugin.py", "sidecar/check/installed.py"):
        text = text.replace("sglang.srt.plugins", "")  # the group of entry points
    if name in ("sidecar/cli.py", "sidecar/run.py"):
        text = text.replace("sglang.launch_server", "")  # the command that `run` starts
    assert "sglang." not in text


@pytest.mark.parametrize("path", EVERY_SOURCE, ids=name_of)
def test_nothing_unsafe(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imports(path)} & FORBIDDEN_IMPORTS
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where}: assert vanishes under -O"
        if not isinstance(node, ast.Call):
            continue
        assert not (isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS), where
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        assert called not in {"system", "popen", "create_subprocess_shell"}, where
        for keyword in node.keywords:
            shell = keyword.arg == "shell"
            quiet = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            assert not shell or quiet, f"{where}: shell"


def fresh_modules(code: str) -> set[str]:
    """Modules that a new interpreter has loaded after `code`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DP_SIDECAR_", "PYTHON"))}
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules, sep='\\n')"]
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "then", ["", "sglang_hook.plugin.register()"], ids=["imported", "registered"]
)
def test_inert_plugin_loads_nothing(then: str) -> None:
    before = fresh_modules("import os")
    loaded = fresh_modules(f"import sglang_hook.plugin\n{then}") - before
    assert loaded == {"sglang_hook", "sglang_hook.plugin"}


def test_distribution_declares_the_plugin() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dp_sidecar = "sglang_hook.plugin:register"' in text
    assert '[project.entry-points."sglang.srt.plugins"]' in text


@pytest.mark.parametrize("path", sources("bench/model") + sources("bench/arms"), ids=name_of)
def test_the_model_does_no_io_and_reads_no_clock(path: Path) -> None:
    roots = {name.partition(".")[0] for name in imports(path)}
    assert not roots & (IMPURE | {"sglang"})
    assert not [name for name in imports(path) if name.startswith(("bench.live", "bench.simul"))]
