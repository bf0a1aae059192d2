"""`kvfs node`: what people do with the members of a cluster. What answers here are members without
mount and data, as they need neither."""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.base.control import ControlServer
from kvfs.cluster.cluster_requests import ClusterRequests
from kvfs.cluster.membership import About, Measured, Membership, joined
from kvfs.cluster.node_records import NodeRecord
from kvfs.datastore import layout
from kvfs.node.tasks.lease_renewer import Renewal
from tests.cluster.waiting import wait_until
from tests.contract.direct import Direct
from tests.contract.redis_servers import RedisServer, killed
from tests.integration.harness import kvfs

GIB = 1 << 30


async def _present_layout() -> bool:
    return False


async def _all_followed() -> None:
    """There are no shards of namespaces."""


class Member:
    """A node that has joined and answers on its control socket, until `stop`."""

    def __init__(self, store: Path, url: str, zone: str) -> None:
        self.store = store
        self.url = url
        self._about = About(name=store.name, peer=f"{store.name}:9002", zone=zone)
        self._stopping: trio.Event
        self._token: trio.lowlevel.TrioToken
        started: Future[None] = Future()
        self._thread = threading.Thread(target=trio.run, args=(self._run, started))
        self._thread.start()
        started.result()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._token.run_sync_soon(self._stopping.set)
            self._thread.join()

    async def _run(self, started: "Future[None]") -> None:
        self._stopping, self._token = trio.Event(), trio.lowlevel.current_trio_token()
        store = layout.create_store(self.store)
        store.lock()
        engine = await trio.to_thread.run_sync(Direct, self.url)
        try:
            async with joined(store, self.url, self._about) as member:
                await member.announce(
                    engine, lambda: Measured(3 * GIB, 8 * GIB, obstacle="2 files in use")
                )
                await self._serve(store, member, engine, started)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            engine.close()
            store.unlock()

    async def _serve(
        self,
        store: layout.Store,
        member: Membership,
        engine: Direct,
        started: "Future[None]",
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Renewal(member, engine).run)

            async def fence(removed: Sequence[NodeRecord]) -> None:
                for each in removed:
                    await member.fence(each.number, each.store)

            requests = ClusterRequests(member, engine, _present_layout, fence, _all_followed)
            control = ControlServer(store.socket, requests.handlers())
            await nursery.start(control.serve)
            started.set_result(None)
            await self._stopping.wait()
            nursery.cancel_scope.cancel()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture(scope="module")
def first(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    """The node that everybody else joins."""
    member = Member(tmp_path_factory.mktemp("cluster") / "first", server.url, "north")
    yield member
    member.stop()


def on(member: Member, *arguments: str) -> Any:
    """What `kvfs node ...` prints, asked of a member."""
    done = kvfs("node", *arguments, "--store", str(member.store))
    assert done.returncode == 0, done.stderr
    return done.stdout


def join(store: Path, member: Member, secret: str, *flags: str) -> Any:
    return kvfs(
        *("node", "join", "--engine", member.url, "--store", str(store), *flags), given=secret
    )


def nodes(member: Member) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(on(member, "list", "--json"))["nodes"]}


def lease_of(name: str, seen_by: Member) -> str:
    return str(nodes(seen_by).get(name, {}).get("lease"))


def test_a_node_is_let_in_listed_emptied_and_removed(first: Member, tmp_path: Path) -> None:
    secret = on(first, "secret")
    store = tmp_path / "second"
    done = join(store, first, secret)
    assert done.returncode == 0, done.stderr
    assert secret.strip().rpartition(":")[2] not in done.stdout
    second = Member(store, first.url, "south")
    try:
        wait_until(lambda: lease_of("second", first) == "held", "second is seen")
        # It joins before it has measured its space, and tells that with a later renewal.
        wait_until(lambda: nodes(first)["second"]["free_bytes"] == 3 * GIB, "it tells its space")
        shown = nodes(first)["second"]
        assert (shown["zone"], shown["peer"]) == ("south", "second:9002")
        text = on(first, "list")
        assert "north" in text
        assert "south" in text
        assert "3.0 GiB" in text

        assert "is being emptied" in on(first, "drain", "second")
        wait_until(lambda: nodes(second)["second"]["state"] == "draining", "it drains")
        wait_until(lambda: "second) still has 2 files in use" in on(first, "list"), "it says why")
        assert "is given data again" in on(second, "drain", "second", "--stop")

        refused = kvfs("node", "remove", "second", "--store", str(first.store))
        assert (refused.returncode, "kvfs node drain" in refused.stderr) == (4, True)
    finally:
        second.stop()
    wait_until(lambda: lease_of("second", first) == "left", "second is gone")
    on(first, "remove", "second")
    wait_until(lambda: "second" not in nodes(first), "second is removed")

    with pytest.raises(Exception, match="kvfs node join --again"):
        Member(store, first.url, "south")
    assert join(store, first, secret, "--again").returncode == 0
    again = Member(store, first.url, "south")
    again.stop()


def test_a_secret_is_replaced(first: Member, tmp_path: Path) -> None:
    old = on(first, "secret")
    both = on(first, "secret", "--rotate")
    assert both.endswith(old)
    assert both.count("\n") == 2
    assert on(first, "secret", "--retire") == ""
    new = on(first, "secret")
    assert new == both.removesuffix(old)
    refused = join(tmp_path / "late", first, old)
    assert (refused.returncode, "not valid" in refused.stderr) == (5, True)
    assert not (tmp_path / "late").exists()


def test_mistakes_are_named(first: Member, server: RedisServer, tmp_path: Path) -> None:
    secret, store = on(first, "secret"), tmp_path / "store"
    key = secret.strip().rpartition(":")[2]
    at = ("--store", str(store))
    elsewhere = f"{server.url}?prefix=none"
    cases = [
        (join(store, first, "nonsense\n"), 2, "no secret of a cluster"),
        (join(store, first, ""), 2, "holds 0 secrets"),
        (kvfs("node", "join", *at, given=secret), 2, "name the engine"),
        (kvfs("node", "join", *at, "--engine", elsewhere, given=secret), 3, "no cluster"),
        (kvfs("node", "join", *at, "--engine", "http://x", given=secret), 2, "must be a URL"),
        (kvfs("node", "secret", *at), 3, "no secret of a cluster"),
        (kvfs("node", "list", *at), 7, "no node runs"),
        (kvfs("node", "drain", "nobody", "--store", str(first.store)), 3, "no node 'nobody'"),
        (kvfs("node", "remove", "first", "--store", str(first.store)), 2, "itself"),
    ]
    for done, code, text in cases:
        assert (done.returncode, text in done.stderr) == (code, True), done.stderr
        assert key not in done.stderr
        assert "Traceback" not in done.stderr
    assert not store.exists()
