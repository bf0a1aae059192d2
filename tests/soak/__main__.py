"""`./dev soak`: three nodes under load and faults for hours.

Prints a line for each round and a summary, then one JSON object; exits with 1 where something did
not hold. The cluster is gone afterwards, unless something did not hold: then its logs are kept.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.cluster.cluster import Cluster
from tests.cluster.histories.events import Hangs
from tests.cluster.network import Lacking
from tests.integration.harness import CannotStart
from tests.soak.faults import own_disks
from tests.soak.soak import SERVES, Soak, SoakResult

_HOUR_S: Final = 3_600.0


def main() -> int:
    options = _options()
    seconds = options.seconds or options.hours * _HOUR_S
    print(f"seed {options.seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="kvfs-soak-", dir=options.dir)).resolve()
    root.chmod(0o755)
    try:
        numbers = range(1, options.nodes + 1)
        with own_disks(root, numbers), Cluster(root, options.nodes, *SERVES) as cluster:
            soak = Soak(cluster, options.seed, lambda text: print(text, flush=True))
            try:
                result = soak.run(seconds)
            except BaseException:
                _keep_logs(cluster, options.logs)
                raise
            if result.complaints:
                _keep_logs(cluster, options.logs)
    except (Lacking, CannotStart, Hangs) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    _summarize(result)
    told = json.dumps({"seed": options.seed, "seconds": seconds, **result.as_dict()})
    print(told)
    if options.json:
        options.json.write_text(told)
    return 1 if result.complaints else 0


def _keep_logs(cluster: Cluster, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for host in cluster:
        (directory / f"node-{host.number}.log").write_text(host.log)
    shutil.copy(cluster.engine.directory / "log", directory / "engine.log")
    print(f"the logs of the nodes and the engine are in {directory}", flush=True)


def _summarize(result: SoakResult) -> None:
    print(f"{result.rounds} rounds, {result.operations:,} operations judged")
    print(f"  faults: {dict(result.faults)}; left over: {dict(result.rests)}; {result.signs}")
    print(f"  {result.errors_in_faults:,} errors of loads while something was disturbed")
    for name, count in sorted(result.loads.items()):
        print(f"  {name:<16}{count:>10,}")
    for each in result.complaints:
        print(f"  DID NOT HOLD: {each}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0, help="default 1")
    parser.add_argument("--seconds", type=float, default=0.0, help="in place of hours")
    parser.add_argument("--nodes", type=int, default=3, help="default 3")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 30), help="default random"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object there too")
    parser.add_argument("--dir", default="/var/tmp", help="where all is stored; default /var/tmp")
    parser.add_argument("--logs", type=Path, default=Path("/var/tmp/kvfs-soak-logs"), metavar="DIR")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
