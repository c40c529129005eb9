"""deploy/prometheus and deploy/grafana, taken apart; and a real Prometheus to run them in."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from tests.processes import Running, free_port, wait_for

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
# A name, and the matchers behind it if there are any.
_SELECTOR = re.compile(r"(?<![\w:.{\"])((?:sglang|instance)[\w:]*|up)\b(\{[^}]*\})?")


def binary(name: str) -> str:
    """Path of `prometheus` or `promtool`; skips where the Debian package is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: install the Debian packages of .ci/debian-packages")
    return found


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run promtool beside the rules."""
    return subprocess.run(
        [binary("promtool"), *arguments],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def rules() -> list[dict[str, Any]]:
    """Every rule of the files that prometheus.yml names."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    files = [yaml.safe_load((PROMETHEUS / name).read_text()) for name in config["rule_files"]]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def recorded() -> dict[str, str]:
    """Recording rules: name -> expression."""
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def alerts() -> dict[str, dict[str, Any]]:
    """Alerting rules by name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "dashboard.json").read_text())
    return loaded


def queries() -> dict[str, str]:
    """Every expression of the dashboard, by panel and letter; variables and annotations too."""
    board = dashboard()
    found = {
        f"{panel['title']} ({target['refId']})": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    found |= {note["name"]: note["expr"] for note in board["annotations"]["list"]}
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert match, variable
            found[f"variable {variable['name']}"] = f"count by ({match[2]}) ({match[1]})"
    return found


def filled_in(expression: str) -> str:
    """A query as Grafana sends it, every variable at `All`."""
    text = re.sub(r"\$(instance|dp_rank)", ".*", expression).replace("$__rate_interval", "1m")
    assert "$" not in text, text
    return text


def selectors(expression: str) -> set[str]:
    """The instant vectors that an expression is made from."""
    bare = re.sub(r"\b(?:by|on|without|ignoring|group_left|group_right) *\([^)]*\)", "", expression)
    return {name + matchers for name, matchers in _SELECTOR.findall(bare)}


class Server:
    """A real Prometheus with the rules of deploy/prometheus and short intervals.

    folder: for its data; targets: job -> target, as prometheus.yml names the jobs; instance: what
    the job `sglang` is called.
    """

    def __init__(self, folder: Path, targets: dict[str, str], instance: str) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        # The server needs a second to tell its own series on a busy machine.
        config["global"] = {"scrape_interval": "2s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
        for job in config["scrape_configs"]:
            (static,) = job["static_configs"]
            static["targets"] = [targets[job["job_name"]]]
            if "labels" in static:
                static["labels"] = {"instance": instance}
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.process = Running(
            [
                binary("prometheus"),
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ]
        )

    def __enter__(self) -> "Server":
        try:
            wait_for(self._ready, 60, 0.1)
        except BaseException:
            self.process.end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.end()

    def _ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/-/ready", timeout=5).ok
        except requests.ConnectionError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its API; AssertionError with the reason if it is an error."""
        answer = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def scrapes(self) -> dict[str, tuple[str, float]]:
        """Job -> what was wrong with its last scrape, and the seconds that it took."""
        targets = self.get("targets", state="active")["activeTargets"]
        return {one["scrapePool"]: (one["lastError"], one["lastScrapeDuration"]) for one in targets}

    def evaluate(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """An instant query: labels and value of each element that is a number."""
        data = self.get("query", query=expression)
        assert data["resultType"] == "vector", expression
        found = [(each["metric"], float(each["value"][1])) for each in data["result"]]
        return [(labels, value) for labels, value in found if not math.isnan(value)]
