"""What the source may not contain: ways for what a peer sent to become code.

tests/test_architecture.py has the short list (pickle, eval, exec, shell); this is the long one, and
says of each exception where it stands and why.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import EVERY_SOURCE, ROOT, imports, name_of

# Modules that turn bytes into objects or code, or that run others.
NEVER = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "dbm"),
    *("yaml", "jsonpickle", "code", "codeop", "runpy", "imp", "pty", "xmlrpc", "xml", "numpy"),
    "torch",
}
MAY_IMPORT = {
    # Policies, where configuration or an installed package names them; never a peer.
    "importlib": {"sidecar/catalog.py"},
    # Files of ours, and versions of what is installed.
    "importlib.resources": {"sidecar/web.py"},
    "importlib.metadata": {"sidecar/catalog.py", "sidecar/check/installed.py"},
    "importlib.util": {"sglang_hook/check.py"},
    # Ourselves anew, the server, a look at the imports: command lines of ours.
    "subprocess": {"sidecar/takeover.py", "sidecar/check/variables.py"},
    # The name of this process, to tell SGLang's main one from the others.
    "multiprocessing": {"sglang_hook/patches.py"},
    # prctl and malloc_trim, which the standard library lacks.
    "ctypes": {"sidecar/run.py", "sidecar/ceiling.py"},
}
MAY_CALL = {
    # Modules of SGLang by names that stand in the source.
    "__import__": {"sglang_hook/patches.py", "sglang_hook/front.py"},
    "import_module": {"sidecar/catalog.py"},
    "create_subprocess_exec": {"sidecar/run.py"},
    "Popen": {"sidecar/takeover.py"},
}
NEVER_CALLED = {
    *("eval", "exec", "compile", "execfile", "system", "popen", "spawnl", "spawnv", "execv"),
    *("execve", "execl", "execvp", "execle", "posix_spawn", "startfile", "getoutput"),
    *("getstatusoutput", "create_subprocess_shell", "unsafe_load", "full_load", "load_module"),
    *("exec_module", "SourceFileLoader", "interact", "recv_pyobj", "recv_json", "recv_serialized"),
    *("enc_hook", "dec_hook"),
}
# How pickle makes an object of ours. `Carried` (sglang_hook/front.py) is SGLang's to pickle,
# between processes of its own: it names `unpack` of that file, which returns what it was given.
MAY_DEFINE = {"__reduce__": {"sglang_hook/front.py"}}
PICKLED = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__"}


def called(path: Path) -> Iterator[tuple[str, int]]:
    """The last name of each call, and its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            yield name, node.lineno


def modules(path: Path) -> set[str]:
    """Every module that is imported, and those that hold it: a.b.c is a, a.b and a.b.c."""
    found = set()
    for name in imports(path):
        parts = name.split(".")
        found |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return found


@pytest.mark.parametrize("path", EVERY_SOURCE, ids=name_of)
def test_nothing_makes_code_of_bytes(path: Path) -> None:
    imported, name = modules(path), name_of(path)
    assert not imported & NEVER
    for module, allowed in MAY_IMPORT.items():
        inner = any(other.startswith(module + ".") and other in imported for other in MAY_IMPORT)
        assert module not in imported or name in allowed or inner, f"{name} imports {module}"
    for call, line in called(path):
        assert call not in NEVER_CALLED or _is_re(path, line), f"{name}:{line}: {call}"
        assert call not in MAY_CALL or name in MAY_CALL[call], f"{name}:{line}: {call}"


def _is_re(path: Path, line: int) -> bool:
    """`re.compile` is the only `compile` there may be."""
    return "re.compile(" in path.read_text().splitlines()[line - 1]


@pytest.mark.parametrize("path", EVERY_SOURCE, ids=name_of)
def test_nothing_of_ours_says_how_it_is_pickled_but_what_sglang_carries(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in PICKLED:
            assert name_of(path) in MAY_DEFINE.get(node.name, set()), f"{path}:{node.lineno}"


def test_every_exception_is_used() -> None:
    """A permission that nobody needs any more is taken back."""
    for module, allowed in MAY_IMPORT.items():
        assert all(module in modules(ROOT / name) for name in allowed), module
    for call, allowed in MAY_CALL.items():
        assert all(call in dict(called(ROOT / name)) for name in allowed), call


def test_what_sglang_carries_comes_out_as_it_went_in() -> None:
    """Pickle sees a function by its name, and what SGLang gave us: no class of ours, no state."""
    from sglang_hook.front import Carried, unpack

    held = object()
    assert Carried(held).__reduce__() == (unpack, (held,))
