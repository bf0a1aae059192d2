"""Makes the stores of this directory, by hand, once for each version whose stores are to be kept:

    ./dev python -m tests.golden.stores.make VERSION

As root: data files keep their owner. `VERSION-KIND-END.tar.xz` has the store of a lone node, or a
cluster's node's with its engine's dump, left in order or by a SIGKILL; `VERSION-KIND-END.json` what
is known of it beside `contents.py`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvfs.client import Client
from s3api.auth.credentials import Credentials
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.contract.redis_servers import RedisServer
from tests.golden.stores import contents
from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.s3 import S3, users_of

HERE: Final = Path(__file__).resolve().parent
KINDS: Final = ("lone", "cluster")
ENDS: Final = ("clean", "killed")
SERVED: Final = ("--s3", "127.0.0.1:0", "--s3-workers", "1", "--admin", "127.0.0.1:0")
_LEFT_OUT: Final = ("store/run/control.sock", "store/run/kvfs.log")


def flags(server: RedisServer | None) -> tuple[str, ...]:
    """Of `kvfs up`."""
    if server is None:
        return SERVED
    return (*SERVED, "--engine", server.url, "--node-name", "n1", "--peer", "127.0.0.1:0")


def make(version: str, kind: str, end: str) -> None:
    """One store."""
    node = Node.make(best_mode())
    server = RedisServer(node.home / "engine") if kind == "cluster" else None
    try:
        node.flags = flags(server)
        node.up()
        known = _fill(node)
        if end == "clean":
            node.down()
        else:
            contents.write_late(node.mount)
            node.kill()
        if server is not None:
            server.call("SAVE")
        name = f"{version}-{kind}-{end}"
        (HERE / f"{name}.json").write_text(json.dumps(known, indent=4) + "\n")
        _pack(node.home, HERE / f"{name}.tar.xz", with_engine=server is not None)
    finally:
        node.remove()
        if server is not None:
            server.kill()


def _fill(node: Node) -> dict[str, dict[str, str]]:
    done = kvfs("namespace", "create", "team", *contents.TEAM, "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    contents.write(node.mount)
    with users_of(node) as users:
        server = S3(node, {ADMINISTRATOR: users.find(ADMINISTRATOR)})
    main = server.add_user("main", '{"Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}')
    ids = contents.put(server.client("main"))
    with Client(node.store) as client:
        names = ["/models/weights", "/cache/block-1"]
        wait_until(lambda: all(client.stat(each).checksum for each in names), "files are sealed")
        client.sync()
    return {"ids": ids, "user": {"access_key": main.access_key, "secret": main.secret}}


def user(known: dict[str, dict[str, str]]) -> Credentials:
    """Whose the bucket is."""
    return Credentials(known["user"]["access_key"], known["user"]["secret"])


def _pack(home: Path, archive: Path, *, with_engine: bool) -> None:
    parts = ["store", *(["engine/dump.rdb"] if with_engine else [])]
    excluded = [f"--exclude={name}" for name in _LEFT_OUT]
    command = ["tar", "--xattrs", "--xattrs-include=user.*", "--sparse", "--sort=name", *excluded]
    subprocess.run([*command, "-C", str(home), "-cJf", str(archive), *parts], check=True)


def unpack(name: str, home: Path) -> dict[str, dict[str, str]]:
    """Puts a store, and its engine's dump, where they were; what is known of it."""
    command = ["tar", "--xattrs", "--xattrs-include=user.*", "-C", str(home)]
    subprocess.run([*command, "-xJf", str(HERE / f"{name}.tar.xz")], check=True)
    known: dict[str, dict[str, str]] = json.loads((HERE / f"{name}.json").read_text())
    return known


if __name__ == "__main__":
    for each in KINDS:
        for left in ENDS:
            make(sys.argv[1], each, left)
