"""What the pages say besides commands: files, links, queries and settings that they name."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from sglang_hook import settings
from sidecar import config
from sidecar.keygen import keygen
from tests.docs.pages import PAGES, blocks, links
from tests.observe import rules
from tests.processes import ROOT

FOLDERS = ("sidecar", "sglang_hook", "bench", "deploy")
README = (ROOT / "README.md").read_text()
# Most lines that a page may have before a part of it becomes a page.
LONGEST = {"README.md": 105, "docs/operations.md": 450}


@pytest.mark.parametrize("page", LONGEST)
def test_it_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= LONGEST[page]


def named() -> list[str]:
    """Files and folders in the first column of the README's table of things.

    The first of a row has its folder with it, the others are beside that one.
    """
    found = []
    for row in README.partition("\n## Where things are\n")[2].splitlines():
        spans = re.findall(r"`([^`]+)`", row.split("|")[1]) if row.startswith("| `") else []
        folder = spans[0].partition("/")[0] if spans else ""
        found += [span if span == spans[0] else f"{folder}/{span}" for span in spans]
    return [name.rstrip("/") for name in found]


def there() -> set[str]:
    """Every module and folder of the four folders."""
    children = {path for folder in FOLDERS for path in (ROOT / folder).iterdir()}
    modules = {path for path in children if path.suffix == ".py" and path.name[:2] != "__"}
    folders = {path for path in children if (path / "__init__.py").exists()}
    folders |= {path for path in children if path.parent.name == "deploy" and path.is_dir()}
    return {str(path.relative_to(ROOT)) for path in modules | folders}


def test_where_things_are_names_everything_once() -> None:
    names = [name for name in named() if "/" in name]
    assert sorted(names) == sorted(there())


def test_whole_folders_that_are_named_exist() -> None:
    whole = [name for name in named() if "/" not in name]
    assert set(whole) == {"tests", ".ci"}
    assert all((ROOT / name).is_dir() for name in whole)


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("page", "target"), links(), ids=lambda value: str(value).split("/")[-1])
def test_every_link_leads_somewhere(page: Path, target: str) -> None:
    file, _, anchor = target.partition("#")
    path = page.parent / file if file else page
    assert path.exists()
    assert not anchor or anchor in headings(path)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    paths = re.findall(r"(?<![\w/.-])(?:deploy|docs|tests|bench|sidecar|\.ci)/[\w./-]*\w", text)
    for name in paths:
        base = ROOT / "tests" if name == "docs/" else ROOT
        generated = name.startswith("bench/out")
        assert generated or (base / name).exists(), name


def test_blocks_are_of_languages_that_somebody_checks() -> None:
    # `python` and its files: tests/test_docs_policies.py; "" are commands; `text` is a drawing.
    assert {block.language for block in blocks()} == {"", "ini", "promql", "python", "text", "toml"}


def test_toml_is_a_configuration(tmp_path: Path) -> None:
    for number, block in enumerate(blocks()):
        if block.language == "toml":
            file = tmp_path / f"{number}.toml"
            file.write_text(block.text)
            config.load(file, {}, {})


def test_the_variables_of_another_node_are_what_the_hook_takes(tmp_path: Path) -> None:
    keygen(str(tmp_path / "keys"))
    [text] = [block.text for block in blocks() if block.language == "ini"]
    env = dict(line.split("=", 1) for line in text.splitlines())
    env["DP_SIDECAR_CURVE_SERVER_KEY"] = (tmp_path / "keys" / "sidecar.key").read_text().strip()
    env["DP_SIDECAR_CURVE_SECRET_KEY_FILE"] = str(tmp_path / "keys" / "hook.key_secret")
    assert settings.load(env).report_endpoint == env["DP_SIDECAR_REPORT_ENDPOINT"]


def test_every_variable_of_the_hook_is_listed_with_its_default() -> None:
    section = (ROOT / "docs" / "operations.md").read_text().partition("\n## Settings\n")[2]
    rows = re.findall(r"^\| `DP_SIDECAR_(\w+)` \| `?(\w+)", section.partition("\n## ")[0], re.M)
    told = {name.lower(): value for name, value in rows}
    fields = {field.name: field.default for field in msgspec.structs.fields(settings.Settings)}
    assert told.keys() == fields.keys()
    plain = {name: value for name, value in fields.items() if isinstance(value, int)}
    assert len(plain) > 5
    assert {name: told[name] for name in plain} == {n: str(v).lower() for n, v in plain.items()}


def test_queries_are_promql(tmp_path: Path) -> None:
    lines = [
        line for block in blocks() if block.language == "promql" for line in block.text.splitlines()
    ]
    recording = [{"record": f"n{number}:x", "expr": line} for number, line in enumerate(lines)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "pages", "rules": recording}]}))
    ran = rules.promtool("check", "rules", str(file))
    assert ran.returncode == 0, ran.stderr
    assert f"{len(lines)} rules found" in ran.stdout
