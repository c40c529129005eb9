"""Lets PyPI's torchvision import beside a CPU build of torch (test environments only).

torchvision registers fake kernels for two operators that only its compiled CUDA extension
declares; beside a CPU torch that extension does not load, and the import of torchvision, and so of
sglang, fails. `.ci/venv` copies this file into the test environment and runs `install()` from a
`.pth` file. It costs nothing until torchvision is imported, and does nothing beside a CUDA build.
"""

import sys

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


_keep: list = []  # torch.library undoes its definitions when the object is collected


class _DeclareBeforeTorchvision:
    def find_spec(self, fullname, path=None, target=None):
        # importing torch below looks for torchvision too: declare once, not recursively
        if fullname == "torchvision" and not _keep:
            _keep.append(None)
            _declare()


def _declare() -> None:
    import torch

    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        _keep.append(library)
        for schema in _SCHEMAS:
            library.define(schema)


def install() -> None:
    sys.meta_path.insert(0, _DeclareBeforeTorchvision())
