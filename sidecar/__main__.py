"""`python -m sidecar` is `sglang-dp-sidecar`."""

import sys

from sidecar.entry import main

sys.exit(main())
