"""`make fuzz`: drives the targets by coverage, each in a process of its own.

Only `sidecar` and `sglang_hook` are instrumented: msgspec, zmq, aiohttp and xxhash are not seen
inside. The corpus is read from tests/fuzz/corpus; what is new goes to bench/out/fuzz, crashes too.
Ends with 1 if a promise was broken.
"""

import argparse
import sys
from pathlib import Path


def child(name: str, arguments: list[str]) -> None:
    """Fuzz one target in this process; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["sidecar", "sglang_hook"]):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.mutate import WHOLE, mutator

    def plain(data: bytes, most: int) -> bytes:
        mutated: bytes = atheris.Mutate(data, most)  # looked up late: Fuzz puts the real one there
        return mutated

    more = {"custom_mutator": mutator(plain)} if name in WHOLE else {}
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name].run, **more)
    atheris.Fuzz()


def main() -> int:
    """The command line."""
    if len(sys.argv) > 2 and sys.argv[1] == "--child":
        child(sys.argv[2], sys.argv[3:])
        return 0
    from tests.fuzz.campaign import Campaign

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000_000, help="inputs, all targets together")
    parser.add_argument("--target", default="", help="one target, or several with commas")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--out", type=Path, default=Path("bench/out/fuzz"))
    parser.add_argument("--merge", action="store_true", help="only put what was found into corpus/")
    given = parser.parse_args()
    campaign = Campaign(given.out, given.target)
    if given.merge:
        from tests.fuzz.minimize import merge

        merge(campaign.out, campaign.names)
        return 0
    return campaign.run(given.runs, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
