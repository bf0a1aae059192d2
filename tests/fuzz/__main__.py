"""`./dev fuzz`: many inputs for the parsers of what others send.

Prints a line for each parser, findings as they come, and one JSON object at the end; exits with 1
where there is a finding. A finding is repeated by the same --seed and --only.
"""

import argparse
import json
import os
import random
import sys
import time
from typing import Final

from tests.fuzz import peer_targets, s3_targets
from tests.fuzz.campaign import PIECE, Tally, Target, run_piece

ALL: Final = (*peer_targets.TARGETS, *s3_targets.TARGETS)
_LOWEST: Final = 19


def main() -> int:
    options = _options()
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    chosen = [each for each in ALL if options.only in each.name]
    if not chosen:
        print(f"fuzz: there is no parser like '{options.only}'", file=sys.stderr)
        return 2
    print(f"seed {options.seed}", flush=True)
    each = -(-options.inputs // len(chosen))
    found = {target.name: _run(target, options.seed, options.first, each) for target in chosen}
    findings = [finding for tally in found.values() for finding in tally.findings]
    result = {
        "seed": options.seed,
        "inputs": sum(tally.inputs for tally in found.values()),
        "refused": sum(tally.refused for tally in found.values()),
        "findings": [
            {"target": finding.target, "input": finding.data.hex(), "error": finding.error}
            for finding in findings
        ],
    }
    print(json.dumps(result))
    return 1 if findings else 0


def _run(target: Target, seed: int, first: int, inputs: int) -> Tally:
    tally, began = Tally(), time.monotonic()
    for number in range(-(-inputs // PIECE)):
        before = len(tally.findings)
        run_piece(target, seed, first + number, tally, min(PIECE, inputs - number * PIECE))
        for finding in tally.findings[before:]:
            print(f"{finding.target}: {finding.data!r}\n{finding.error}", flush=True)
    took_s = time.monotonic() - began
    print(
        f"{target.name:<16}{tally.inputs:>10,} inputs, {tally.refused:>10,} refused,"
        f" {len(tally.outcomes):>4} outcomes, {len(tally.findings)} findings, {took_s:.0f} s",
        flush=True,
    )
    return tally


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev fuzz", description="Fuzz the parsers.")
    parser.add_argument("--inputs", type=int, default=100_000, help="in all; default 100,000")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 32), help="default random"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first piece; default 0")
    parser.add_argument("--only", default="", metavar="NAME", help="only parsers so named")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
