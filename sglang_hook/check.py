"""What the hook would make of this environment: `python -m sglang_hook.check` prints it as JSON.

For `sglang-dp-sidecar check`, which starts it as SGLang starts: another `sidecar` or `sglang_hook`
on the path is found here, not there. `packages`: file of each; `variables`: names of the settings;
`problem`: why the hook would not attach, or null; `error` instead, if it cannot be imported.
"""

import importlib.util
import json
import os
import sys
from typing import Any


def look() -> dict[str, Any]:
    """All of it; imports nothing before it knows where that comes from."""
    told: dict[str, Any] = {"packages": {}}
    for package in ("sidecar", "sglang_hook"):
        spec = importlib.util.find_spec(package)
        if spec is not None:
            places = list(spec.submodule_search_locations or ())
            told["packages"][package] = spec.origin or (places[0] if places else None)
    try:
        from sglang_hook import settings
        from sglang_hook.plugin import ENABLED_BY
        from sidecar.errors import SidecarError
    except ImportError as error:
        return {**told, "error": str(error)}
    told["variables"] = [
        settings.ENV_PREFIX + n.upper() for n in settings.Settings.__struct_fields__
    ]
    told["problem"] = None
    try:
        # Bad values count where the hook is off too: somebody set them for a reason.
        settings.load({ENABLED_BY: "ipc:///x", **os.environ})
    except SidecarError as error:
        told["problem"] = str(error)
    return told


def main() -> None:
    json.dump(look(), sys.stdout)


if __name__ == "__main__":
    main()
