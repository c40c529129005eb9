"""The hook adds no dependency to SGLang's environment: by the metadata of the installed SGLang."""

from importlib.metadata import PackageNotFoundError, requires, version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(distribution: str, extra: str = "") -> list[Requirement]:
    """What a distribution requires here, with an extra or without one."""
    found = [Requirement(line) for line in requires(distribution) or ()]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": extra})]


def closure(distribution: str) -> set[str]:
    """Names of what `pip install` of a distribution brings, as far as it is installed here.

    SGLang's CUDA packages are not: what they need does not count.
    """
    seen: set[str] = set()
    todo = [canonicalize_name(distribution)]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            todo += [canonicalize_name(r.name) for r in required(name)]
        except PackageNotFoundError:
            continue
    return seen


@pytest.mark.parametrize("extra", ["", "daemon"], ids=["hook", "daemon"])
def test_sglang_brings_all_that_we_need(extra: str) -> None:
    brought = closure("sglang")
    ours = required("sglang-dp-sidecar", extra)
    assert len(ours) >= 3
    assert {canonicalize_name(r.name) for r in ours} <= brought
    for requirement in ours:
        assert requirement.specifier.contains(version(requirement.name)), requirement


@pytest.mark.parametrize("name", ["msgspec", "pyzmq"])
def test_what_sglang_says_of_them_lies_within_what_we_say(name: str) -> None:
    """Both ask for a least version at most; if SGLang ever pins one, ours must allow it."""
    [theirs] = [r for r in required("sglang") if canonicalize_name(r.name) == name]
    [ours] = [r for r in required("sglang-dp-sidecar") if r.name == name]
    for least in (spec.version for spec in theirs.specifier if spec.operator in (">=", "==")):
        assert ours.specifier.contains(least)
