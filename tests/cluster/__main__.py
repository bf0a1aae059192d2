"""`./dev cluster`: an engine and nodes on this machine, to try out what several of them do.

Each has a network namespace, and its mount at DIR/<n>/mnt. Where a command names a node, `engine`
means the metadata server.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Final

from tests.cluster import engine
from tests.cluster.cluster import S3_PORT, SERVES_S3, Cluster, Host
from tests.cluster.network import Lacking
from tests.integration.harness import CannotStart

_ROOT: Final = Path("/var/tmp/kvfs-cluster")


def main() -> int:
    options = _options()
    try:
        cluster = Cluster(options.root, options.size if options.command == "up" else 0, *SERVES_S3)
        if options.command != "up" and not cluster.network.exists:
            up = f"./dev cluster up{_said_root(options.root)} 3"
            raise Lacking(f"no cluster runs below {options.root}; `{up}` starts one")
        _COMMANDS[options.command](cluster, options)
    except (Lacking, CannotStart, OSError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _up(cluster: Cluster, options: argparse.Namespace) -> None:
    try:
        cluster.up()
    except BaseException:
        down = f"./dev cluster down{_said_root(options.root)}"
        print(f"cluster: not all came up; `{down}` takes it away", file=sys.stderr)
        raise
    _status(cluster, options)
    last = max(cluster.hosts)
    root = _said_root(options.root)
    print(
        f"\nTry:\n"
        f"  echo hello > {cluster[1].mount}/cache/a; cat {cluster[last].mount}/cache/a\n"
        f"  ./dev cluster kill{root} {last}; ./dev cluster start{root} {last}\n"
        f"  ./dev cluster partition{root} {last}; ./dev cluster heal{root} {last}\n"
        f"  ./dev cluster run{root} {last} curl {cluster[1].admin}/metrics\n"
        f"  ./dev cluster down{root}"
    )


def _said_root(root: Path) -> str:
    """The option that a command needs to find this cluster."""
    return "" if root == _ROOT else f" --root {shlex.quote(str(root))}"


def _status(cluster: Cluster, _options: argparse.Namespace) -> None:
    said = "runs" if cluster.engine.is_running() else "does not run"
    print(f"engine  {cluster.engine.url}  {said}{_cut(cluster, engine.HOST)}")
    for host in cluster:
        pid = host.find()
        said = f"process {pid}" if pid else "does not run"
        s3 = f"S3 http://{host.address}:{S3_PORT}"
        print(f"{host.name:<7} {host.mount}  {s3}  {said}{_cut(cluster, host.name)}")


def _cut(cluster: Cluster, name: str) -> str:
    return "" if cluster.network.is_whole(name) else "  CUT OFF"


def _kill(cluster: Cluster, options: argparse.Namespace) -> None:
    if options.node == engine.HOST:
        cluster.engine.kill()
    else:
        _host(cluster, options.node).kill()


def _start(cluster: Cluster, options: argparse.Namespace) -> None:
    if options.node == engine.HOST:
        cluster.engine.start()
    else:
        _host(cluster, options.node).up()


def _partition(cluster: Cluster, options: argparse.Namespace) -> None:
    cluster.partition(_name(cluster, options.node), options.ways)


def _heal(cluster: Cluster, options: argparse.Namespace) -> None:
    cluster.heal(_name(cluster, options.node))


def _run(cluster: Cluster, options: argparse.Namespace) -> None:
    command = [*cluster.network.inside(_name(cluster, options.node)), *options.words]
    os.execvp(command[0], command)


def _down(cluster: Cluster, _options: argparse.Namespace) -> None:
    cluster.down()
    print(f"What was stored is below {cluster.root} still; `up` goes on with it.")


def _host(cluster: Cluster, name: str) -> Host:
    return cluster[int(_name(cluster, name))]


def _name(cluster: Cluster, name: str) -> str:
    names = [engine.HOST, *(host.name for host in cluster)]
    if name not in names:
        raise Lacking(f"there is no '{name}'; there are: {', '.join(names)}")
    return name


_COMMANDS: Final = {
    "up": _up,
    "status": _status,
    "kill": _kill,
    "start": _start,
    "partition": _partition,
    "heal": _heal,
    "run": _run,
    "down": _down,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dev cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    whole = argparse.ArgumentParser(add_help=False)
    whole.add_argument("--root", type=Path, default=_ROOT, metavar="DIR", help=f"default {_ROOT}")
    one = argparse.ArgumentParser(add_help=False, parents=[whole])
    one.add_argument("node", metavar="N", help="a node's number, or engine")

    up = commands.add_parser("up", parents=[whole], help="start what does not run")
    up.add_argument("size", type=int, metavar="N", choices=range(1, 65), help="how many nodes")
    commands.add_parser("status", parents=[whole], help="what runs where")
    commands.add_parser("kill", parents=[one], help="SIGKILL to one")
    commands.add_parser("start", parents=[one], help="start one that was killed")
    cut = commands.add_parser("partition", parents=[one], help="drop all its packets")
    cut.add_argument("--ways", choices=("both", "in", "out"), default="both")
    commands.add_parser("heal", parents=[one], help="the end of a partition")
    run = commands.add_parser("run", parents=[one], help="run a command on one's host")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    commands.add_parser("down", parents=[whole], help="stop and unmount all")
    options = parser.parse_args()
    if options.command == "run":
        _take_root(options)
    return options


def _take_root(options: argparse.Namespace) -> None:
    """Options of this program end where the command begins, and not with the host."""
    first = argparse.ArgumentParser(prog="dev cluster run N", add_help=False, allow_abbrev=False)
    first.add_argument("--root", type=Path, default=options.root)
    while options.words and options.words[0].partition("=")[0] == "--root":
        count = 1 if "=" in options.words[0] else 2
        options.root = first.parse_args(options.words[:count]).root
        options.words = options.words[count:]
    if not options.words:
        first.error("COMMAND is missing")


if __name__ == "__main__":
    sys.exit(main())
