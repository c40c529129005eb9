"""Policies from outside: found, checked, tried, loaded anew; what is no good changes nothing."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sidecar.catalog import GROUP, Catalog, offered, parameters
from sidecar.errors import ConfigError
from sidecar.policies import REGISTRY
from tests.outside import distribution, sound
from tests.support import keyed, make_dispatcher, query

_names = itertools.count()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.fixture
def module(folder: Path) -> Iterator[str]:
    """A name for a module that nobody has used; forgotten afterwards."""
    name = f"outside_{next(_names)}"
    yield name
    for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[loaded]


def chosen(policy: object) -> tuple[int, str]:
    dispatcher = make_dispatcher("kv_affinity")
    dispatcher.swap_policy(policy)  # type: ignore[arg-type]
    reply = dispatcher.handle(query([keyed("a")]), 0.0)
    return reply.ranks[0], reply.reasons[0]


# ---- entry points


def test_a_package_offers_a_policy(folder: Path, module: str) -> None:
    catalog = Catalog()
    (folder / f"{module}.py").write_text(sound(module))
    distribution(folder, "fancy-routing", {module: f"{module}:Mine"})
    assert offered()[module] == (f"{module}:Mine", "fancy-routing")
    with pytest.raises(ConfigError, match=f"no policy '{module}'.*kv_affinity"):
        catalog.make(module)
    catalog.refresh()
    assert catalog.names() == [*REGISTRY, module]
    policy = catalog.make(module, {"limit": 5})
    assert (policy.name, policy.params.limit) == (module, 5)
    assert chosen(policy) == (0, "placed")
    (listed,) = [one for one in catalog.listing() if one.name == module]
    assert (listed.origin, listed.error) == ("fancy-routing", "")
    limit = listed.params["limit"]
    assert (limit.default, limit.description) == (3, "How many")
    assert limit.bounds == "at least 1, at most 9"
    with pytest.raises(ConfigError, match=r"limit|>= 1"):
        catalog.make(module, {"limit": 0})


def test_a_configuration_names_one_that_was_installed_meanwhile(folder: Path, module: str) -> None:
    catalog = Catalog()
    (folder / f"{module}.py").write_text(sound(module))
    distribution(folder, "fancy-routing", {module: f"{module}:Mine"})
    assert catalog.configured(module).name == module


def test_a_package_that_is_gone_takes_its_policy_along(folder: Path, module: str) -> None:
    offers = {module: (f"{module}:Mine", "p")}
    catalog = Catalog(lambda: offers)
    (folder / f"{module}.py").write_text(sound(module))
    catalog.refresh()
    assert module in catalog.names()
    offers.clear()
    catalog.refresh()
    assert catalog.names() == list(REGISTRY)


def test_broken_ones_are_listed_and_harm_no_other(folder: Path, module: str) -> None:
    (folder / f"{module}.py").write_text(sound(module))
    offers = {
        "half": (f"{module}_half:Mine", "half-written"),
        "gone": ("no_such_module_at_all:Mine", "gone"),
        "kv_affinity": (f"{module}:Mine", "thief"),
        "other": (f"{module}:Mine", "misnomer"),
        "odd": ("not a spec", "odd"),
        "both": ("", "one and two"),
        module: (f"{module}:Mine", "good"),
    }
    (folder / f"{module}_half.py").write_text(sound("half")[:-30] + "(")
    catalog = Catalog(lambda: offers)
    catalog.refresh()
    assert catalog.names() == [*REGISTRY, module]
    errors = {one.name: one.error for one in catalog.listing() if one.error}
    assert list(errors) == ["half", "gone", "kv_affinity (thief)", "other", "odd", "both"]
    assert "SyntaxError" in errors["half"]
    assert "ModuleNotFoundError" in errors["gone"]
    assert "a policy of ours" in errors["kv_affinity (thief)"]
    assert module in errors["other"] and "same" in errors["other"]
    assert "module:Class" in errors["odd"]
    assert "keep one" in errors["both"]
    with pytest.raises(ConfigError, match=r"policy.name: half: .*SyntaxError"):
        catalog.make("half")
    assert catalog.make("kv_affinity").want.block_tokens == 64
    assert catalog.make(module).name == module


def test_two_packages_that_offer_one_name(folder: Path) -> None:
    distribution(folder, "one", {"twin_policy": "one:Mine"})
    distribution(folder, "two", {"twin_policy": "two:Mine"})
    spec, origin = offered()["twin_policy"]
    assert spec == ""
    assert set(origin.split(" and ")) == {"one", "two"}


# ---- module:Class


def test_a_class_of_the_configuration(folder: Path, module: str) -> None:
    (folder / f"{module}.py").write_text(sound("mine"))
    catalog = Catalog(dict)
    name = f"{module}:Mine"
    assert catalog.configured(name, {"limit": 2}).params.limit == 2
    assert catalog.make(name).name == "mine", "known from now on"
    assert catalog.names() == [*REGISTRY, name]
    catalog.refresh()
    assert catalog.names() == [*REGISTRY, name]


def test_only_the_configuration_imports(folder: Path, module: str) -> None:
    (folder / f"{module}.py").write_text("raise SystemExit('imported')\n")
    catalog = Catalog(dict)
    for name in (f"{module}:Mine", "os:getcwd", "sidecar.policies:KvAffinity", f"{module}", ""):
        with pytest.raises(ConfigError, match="no policy"):
            catalog.make(name)
    assert module not in sys.modules


BAD_MODULES = {
    "syntax": ("def (", "SyntaxError"),
    "half-written": (sound()[:200], "no such class|SyntaxError"),
    "raises": (sound(more="1 / 0"), "ZeroDivisionError"),
    "exits": (sound(more="import sys; sys.exit(3)"), "SystemExit: 3"),
    "imports what is not there": (sound(more="import no_such_thing"), "no_such_thing"),
    "no class": ("x = 1", "no such class"),
    "no class but a function": ("def Mine(params): ...", "no such class"),
    "no name": (sound().replace("name =", "nom ="), "name is None"),
    "name of ours": (sound("round_robin"), "one of ours"),
    "bad name": (sound("My Policy"), "My Policy.*a to z"),
    "name as an instance": (sound(more="").replace('name = "mine"', "name = 5"), "name is 5"),
    "no Params": (sound().replace("    Params = Params\n", ""), "Params"),
    "Params no Struct": (sound().replace("Params = Params", "Params = dict"), "Struct"),
    "Params nobody can describe": (
        sound().replace("limit: Annotated", "other: object = None\n    limit: Annotated"),
        "TypeError",
    ),
    "no choose": (sound().replace("def choose", "def chose"), "choose"),
    "no want": (sound().replace("self.want", "self.wish"), "want"),
    "want of another kind": (sound().replace("self.want = Want()", "self.want = {}"), "want"),
    "no params": (sound().replace("self.params", "self.param"), "params"),
    "constructor": (sound().replace("self.params = params", "1 / 0"), "ZeroDivisionError"),
    "constructor without parameter": (sound().replace("self, params", "self"), "TypeError"),
    "raises in the trial": (sound(reason="NO_SUCH"), "NO_SUCH"),
    "nonsense in the trial": (sound().replace("Choice(FIRST", "Choice(99"), "99"),
    "exits in the trial": (sound().replace("return Choice", "raise SystemExit"), "SystemExit"),
    "answers nothing": (sound().replace("return Choice", "Choice"), "TypeError"),
    "fails for some": (
        sound().replace("return Choice", "assert facts.routing_key\n        return Choice"),
        "AssertionError",
    ),
    "name changes": (sound().replace("self.params =", 'self.name = "x"; self.params ='), "name"),
}


@pytest.mark.parametrize("case", BAD_MODULES)
def test_what_is_no_policy(folder: Path, module: str, case: str) -> None:
    text, words = BAD_MODULES[case]
    catalog, file = Catalog(dict), folder / f"{module}.py"
    name = f"{module}:Mine"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        catalog.configured(name)
    assert str(caught.value).startswith("policy.name: ")
    assert len(str(caught.value)) < 600
    assert [one for one in catalog.listing() if one.origin == "built in"]
    # Mended, it is taken without a restart.
    file.write_text(sound(more="# " + "mended " * 40))
    assert chosen(catalog.configured(name)) == (0, "placed")


def test_bad_specs() -> None:
    catalog = Catalog(dict)
    for name in ("no_such_module:Mine", ":Mine", "a:", "a:b:c", "a b:C", "..:C", "os.path:join"):
        with pytest.raises(ConfigError):
            catalog.configured(name)


# ---- loaded anew


def test_changed_code_is_taken(folder: Path, module: str) -> None:
    catalog, file, name = Catalog(dict), folder / f"{module}.py", f"{module}:Mine"
    file.write_text(sound())
    first = catalog.configured(name)
    file.write_text(sound(reason="FALLBACK", more="FIRST = 1"))
    second = catalog.configured(name)
    assert chosen(second) == (1, "fallback")
    assert chosen(first) == (0, "placed"), "the one that runs is the one that was loaded"


@pytest.mark.parametrize("case", ["raises", "no choose", "syntax"])
def test_the_running_policy_keeps_its_globals(folder: Path, module: str, case: str) -> None:
    catalog, file, name = Catalog(dict), folder / f"{module}.py", f"{module}:Mine"
    file.write_text(sound())
    running = catalog.configured(name)
    loaded = sys.modules[module]
    broken = {
        "raises": sound(more="FIRST = 7\n1 / 0"),
        "no choose": sound(more="FIRST = 7").replace("def choose", "def chose"),
        "syntax": "FIRST = 7\n(",
    }
    file.write_text(broken[case])
    with pytest.raises(ConfigError):
        catalog.configured(name)
    assert chosen(running) == (0, "placed")
    assert sys.modules[module] is loaded
    assert chosen(catalog.make(name)) == (0, "placed"), "what was known stays known"


def test_a_package_is_loaded_anew_with_its_modules(folder: Path, module: str) -> None:
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(f"from {module}.inner import Mine\n")
    inner = folder / module / "inner.py"
    inner.write_text(sound())
    catalog = Catalog(lambda: {"mine": (f"{module}:Mine", "p")})
    catalog.refresh()
    assert chosen(catalog.make("mine")) == (0, "placed")
    inner.write_text(sound(reason="FALLBACK", more="FIRST = 1"))
    catalog.refresh()
    assert chosen(catalog.make("mine")) == (1, "fallback")


def test_what_others_use_is_not_loaded_anew() -> None:
    before = sys.modules["sidecar.policies.kv_affinity"], sys.modules["json"]
    catalog = Catalog(dict)
    assert catalog.configured("sidecar.policies.kv_affinity:KvAffinity").name == "kv_affinity"
    with pytest.raises(ConfigError, match="name is None"):
        catalog.configured("json:JSONDecoder")
    assert (sys.modules["sidecar.policies.kv_affinity"], sys.modules["json"]) == before


def test_parameters_of_ours_are_described() -> None:
    for policy in REGISTRY.values():
        for parameter in parameters(policy.Params).values():
            assert parameter.default is not None
    ratio = parameters(REGISTRY["kv_affinity"].Params)["move_ratio"]
    assert (ratio.default, ratio.bounds) == (2.0, "at least 1, at most 1000000")
    fallback = parameters(REGISTRY["prefix_affinity"].Params)["fallback"]
    assert fallback.bounds == "one of round_robin, total_requests, total_tokens"
    assert GROUP == "sglang_dp_sidecar.policies"
    msgspec.json.encode(Catalog(dict).listing())


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[sglang_dp_sidecar.policies]\nno value\n"])
def test_metadata_that_cannot_be_read_spoil_no_policy_of_ours(folder: Path, text: bytes) -> None:
    distribution(folder, "unsound", {})
    (folder / "unsound-1.0.dist-info" / "entry_points.txt").write_bytes(text)
    catalog = Catalog()
    catalog.refresh()
    assert catalog.names() == [*REGISTRY]
    (broken,) = [one for one in catalog.listing() if one.error]
    assert "metadata of some package" in broken.error
