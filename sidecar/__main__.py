"""`python -m sidecar` is `sglang-dp-sidecar`."""

import sys

from sidecar.cli import main

sys.exit(main())
