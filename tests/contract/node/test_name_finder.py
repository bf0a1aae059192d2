"""Names that are said to be on other nodes: what is asked, believed, taken over and forgotten, by
nodes without mounts."""

import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.base.errors import Invalid, Unavailable
from kvfs.cluster.handshake import Party
from kvfs.cluster.peer_server import OfFile
from kvfs.datastore.files import DataFiles
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Flag, Inode, namespace_root
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.node.names.name_finder import NameFinder
from kvfs.node.names.name_holder import NameHolder
from kvfs.node.names.name_leases import NameLeases
from kvfs.node.names.name_questions import NameQuestions
from kvfs.node.names.tombstones import Tombstones
from kvfs.tree import inodes, namespaces, tree
from kvfs.tree.copies import placements
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldPage
from kvfs.vfs.inode_holders import Holders
from tests.contract.small_node import new_inode
from tests.contract.tombs import removed
from tests.jumping import run_jumping

TOP = namespace_root(1)


class OwnNames(EmbeddedEngine):
    """Metadata of which all are this node's own."""

    def shard(self, namespace_id: int) -> int:  # noqa: ARG002
        return 0

    def is_local(self, namespace_id: int) -> bool:
        return bool(namespace_id)


class Host:
    """A node, as far as it keeps and finds names. `others` answer its questions."""

    def __init__(self, root: Path, number: int, others: dict[int, "Host"]) -> None:
        root.mkdir()
        self.engine = OwnNames(root / "meta")
        self.engine.node = keys.pack_node(number)
        self.engine.transact_now(_make_namespace)
        (root / "data").mkdir()
        self.files = DataFiles(root / "data")
        self.in_use = set[int]()
        self.claims: list[int] = []
        self.unclaimed = set[bytes]()
        self.asked: list[list[bytes]] = []
        self.denied: list[bytes] = []
        self.told_of: list[bytes] = []
        """Paths that it told of in lists."""
        self.is_silent = False
        self.given_up: list[int] = []
        self.stones = Tombstones(self.engine)
        self.leases = NameLeases(trio.current_time)
        self.holder = NameHolder(
            *(self.engine, self.files, Holders(), self.leases),
            self.stones.renews,
            lambda _space, path: self.denied.append(path),
            lambda _space, paths: self.told_of.extend(paths),
        )
        self.questions = NameQuestions(self._call)
        self.finder = NameFinder(
            *(self.engine, number, self.in_use.__contains__, DirectoryPaths(self.engine)),
            lambda _space, path: [] if path in self.unclaimed else self.claims,
            lambda: None,
            self.questions,
            self.list_others,
            self.stones,
            self._give_up,
        )
        self._others = others
        self._next = TOP + number * 1000
        others[number] = self

    async def _call(
        self, node: int, _method: str, params: Any, deadline_s: float, _takes: int = 0
    ) -> Any:
        other = self._others[node]
        other.asked.append([path for _, path in params[1]])
        if other.is_silent:
            await trio.sleep(deadline_s)
            raise Unavailable("no answer")
        await trio.sleep(0.001)
        told = await other.holder.confirm(Party("c", node, 1, "n"), params)
        return told.result if isinstance(told, OfFile) else told

    async def list_others(self, asked: Sequence[AskedPage], _detail: Detail) -> list[ToldPage]:
        return [ToldPage([])] * len(asked)

    async def _give_up(self, ino: int, _inode: Inode) -> None:
        self.given_up.append(ino)

    def write(self, name: bytes, parent: int = TOP) -> int:
        """Make a file that is published and whole here."""
        ino, inode = self._number(), new_inode()
        inode.size, inode.blocks, inode.flags = 5, 8, Flag.PUBLISHED | Flag.SEALED
        inode.checksum = b"c" * 16
        self.engine.transact_now(lambda t: tree.add(t, parent, name, ino, inode))
        with open(self.files.create(ino, 0), "wb") as file:
            file.write(b"block")
        return ino

    def make_directory(self, name: bytes, parent: int = TOP) -> int:
        ino, inode = self._number(), new_inode()
        inode.mode = stat.S_IFDIR | 0o750
        self.engine.transact_now(lambda t: tree.add(t, parent, name, ino, inode))
        return ino

    def look(self, path: bytes) -> tuple[int, Inode] | None:
        def fn(t: Transaction) -> tuple[int, Inode] | None:
            ino, found = TOP, None
            for name in path.split(b"/"):
                found = tree.find(t, ino, name)
                if found is None:
                    return None
                ino = found[0]
            return found

        return self.engine.read_now(fn)

    def usage(self) -> tuple[int, int]:
        usage = self.engine.read_now(lambda t: namespaces.usage(t, 1))
        return usage.bytes, usage.inodes

    def _number(self) -> int:
        self._next += 1
        return self._next


def _make_namespace(t: Transaction) -> None:
    namespaces.format(t, 1, 0, 0)
    namespaces.create(t, b"blocks", kind="cache", coherence="peer", uid=0, gid=0, now=1)


def run(tmp_path: Path, step: Callable[..., Any], kind: type[Host] = Host) -> None:
    """Three hosts, of which the first asks the others; time passes as they wait."""

    async def main() -> None:
        others: dict[int, Host] = {}
        hosts = [kind(tmp_path / str(number), number, others) for number in (1, 2, 3)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hosts[0].questions.run)
            await trio.sleep(0.001)
            await step(*hosts)
            nursery.cancel_scope.cancel()
        for host in hosts:
            host.engine.close()

    run_jumping(main)


def test_what_a_holder_tells_is_taken_over_with_its_directories(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, _: Host) -> None:
        above = there.make_directory(b"b", there.make_directory(b"a"))
        ino = there.write(b"x", above)
        there.engine.transact_now(lambda t: inodes.set_xattr(t, ino, b"user.k", b"v", 0, 1))
        assert not await here.finder.find([(TOP, b"a")])  # nobody claims it
        assert there.asked == []
        here.claims = [1, 2]
        assert await here.finder.find([(TOP, b"a")])
        directory = here.look(b"a")
        assert directory is not None
        assert directory[1].flags & Flag.IMPLIED
        assert stat.S_IMODE(directory[1].mode) == 0o750
        assert await here.finder.find([(directory[0], b"b")])
        found = here.look(b"a/b")
        assert found is not None
        assert await here.finder.find([(found[0], b"x")])
        told, known = there.look(b"a/b/x"), here.look(b"a/b/x")
        assert told is not None
        assert known is not None
        assert known[0] == told[0] == ino
        assert (known[1].size, known[1].checksum) == (5, b"c" * 16)
        assert here.engine.read_now(lambda t: inodes.get_xattr(t, ino, b"user.k")) == b"v"
        holders = here.engine.read_now(lambda t: placements.holders(t, ino))
        assert [keys.unpack_node(each.node) for each in holders] == [2]
        assert here.usage() == (0, 3)
        assert there.leases.holds(ino)
        await trio.sleep(6)
        assert not there.leases.holds(ino)

    run(tmp_path, step)


def test_a_name_of_a_namespace_that_went_meanwhile_is_a_miss(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, _third: Host) -> None:
        there.write(b"a")
        there.write(b"b")
        here.claims = [2]
        here.engine.transact_now(lambda t: t.delete(keys.namespace(1)))
        assert not await here.finder.find([(TOP, b"a"), (TOP, b"b")])
        assert there.asked

    run(tmp_path, step)


def test_looks_of_one_moment_share_a_request(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, _: Host) -> None:
        names = [b"%03d" % number for number in range(60)]
        for name in names:
            there.write(name)
        here.claims = [2]
        assert await here.finder.find([(TOP, name) for name in names[:50]])
        assert len(there.asked) == 1
        async with trio.open_nursery() as nursery:
            for name in names[50:]:
                nursery.start_soon(here.finder.find, [(TOP, name)])
        assert [len(each) for each in there.asked] == [50, 10]

    run(tmp_path, step)


def test_the_next_holder_is_asked_and_a_silent_one_rests(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, third: Host) -> None:
        there.is_silent = True
        third.write(b"x")
        here.claims = [2, 3]
        began = trio.current_time()
        assert await here.finder.find([(TOP, b"x")])
        assert 1.0 <= trio.current_time() - began < 1.5
        assert not await here.finder.find([(TOP, b"y")])
        assert trio.current_time() - began < 1.5
        assert there.asked == [[b"x"]]
        assert third.denied == [b"y"]
        assert here.finder.counters["false_claims"] == 1

    run(tmp_path, step)


def test_a_record_without_data_is_believed_for_a_moment_only(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, _: Host) -> None:
        ino = there.write(b"x")
        here.claims = [2]
        assert await here.finder.find([(TOP, b"x")])
        assert is_doubtful(here, ino) is False
        await trio.sleep(2.1)
        assert is_doubtful(here, ino) is True
        assert await here.finder.find([(TOP, b"x")])
        assert is_doubtful(here, ino) is False
        there.files.unlink(ino, 0)
        await trio.sleep(2.1)
        assert await here.finder.find([(TOP, b"x")])
        assert here.given_up == [ino]
        assert here.finder.counters["stale_claims"] == 1

    run(tmp_path, step)


def test_what_nobody_fetched_is_forgotten_once_no_kernel_knows_it(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, _: Host) -> None:
        kept, forgotten, fetched = (there.write(name) for name in (b"k", b"f", b"h"))
        here.claims = [2]
        assert await here.finder.find([(TOP, name) for name in (b"k", b"f", b"h")])
        here.in_use.add(kept)
        here.engine.transact_now(lambda t: placements.hold_alone(t, fetched, 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.finder.run)
            await trio.sleep(5)
            assert [here.look(name) is not None for name in (b"k", b"f", b"h")] == [
                True,
                False,
                True,
            ]
            here.in_use.clear()
            await trio.sleep(5)
            assert here.look(b"k") is None
            nursery.cancel_scope.cancel()
        assert here.usage() == (0, 1)
        assert here.engine.read_now(lambda t: placements.is_held(t, forgotten)) is False

    run(tmp_path, step)


def test_a_directory_that_came_goes_with_the_last_name_in_it(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, _: Host) -> None:
        own = here.make_directory(b"own")
        above = there.make_directory(b"a")
        ino = there.write(b"x", there.make_directory(b"b", above))
        here.claims = [2]
        for path in (b"a", b"a/b", b"a/b/x"):
            *directories, name = path.split(b"/")
            parent = here.look(b"/".join(directories)) if directories else (TOP, None)
            assert parent is not None
            assert await here.finder.find([(parent[0], name)])
        below = here.look(b"a/b")
        assert below is not None
        here.in_use.add(below[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.finder.run)
            await trio.sleep(5)
            assert here.look(b"a/b/x") is None
            here.finder.left(below[0])
            here.finder.left(own)
            await trio.sleep(5)
            assert here.look(b"a/b") is not None  # a program may be in it
            here.in_use.clear()
            await trio.sleep(5)
            nursery.cancel_scope.cancel()
        assert here.look(b"a") is None
        assert here.look(b"own") is not None
        assert here.usage() == (0, 1)
        assert there.look(b"a/b/x") == (ino, there.look(b"a/b/x")[1])  # type: ignore[index]

    run(tmp_path, step)


def test_a_directory_of_somebody_else_is_no_way_to_what_a_holder_has(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, _: Host) -> None:
        there.write(b"x", there.make_directory(b"d"))  # of root, 0750
        mine = here.make_directory(b"d")
        here.engine.transact_now(
            lambda t: inodes.set_attributes(t, mine, inodes.AttributeChanges(uid=7, mode=0o755), 9)
        )
        here.claims = [2]
        assert not await here.finder.find([(mine, b"x")])
        assert here.look(b"d/x") is None
        here.engine.transact_now(
            lambda t: inodes.set_attributes(t, mine, inodes.AttributeChanges(uid=0, mode=0o750), 9)
        )
        assert await here.finder.find([(mine, b"x")])

    run(tmp_path, step)


def test_a_directory_that_came_follows_the_holders(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, _: Host) -> None:
        at = there.make_directory(b"d")
        there.write(b"x", at)
        there.write(b"y", at)
        here.claims = [2]
        assert await here.finder.find([(TOP, b"d")])
        assert await here.finder.find([(at, b"x")])
        changes = inodes.AttributeChanges(uid=7, mode=0o700)
        there.engine.transact_now(lambda t: inodes.set_attributes(t, at, changes, 2 * 10**18))
        assert await here.finder.find([(at, b"y")])
        found = here.look(b"d")
        assert found is not None
        assert (found[1].uid, stat.S_IMODE(found[1].mode)) == (7, 0o700)

    run(tmp_path, step)


def test_a_name_of_its_own_is_never_replaced_and_one_taken_over_is(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, third: Host) -> None:
        own = here.write(b"x")
        there.write(b"x")
        first, second = there.write(b"y"), third.write(b"y")
        here.claims = [2]
        assert await here.finder.find([(TOP, b"x"), (TOP, b"y")])
        assert ino_of(here, b"x") == own
        assert ino_of(here, b"y") == first
        there.files.unlink(first, 0)
        here.claims = [3]
        await trio.sleep(2.1)
        assert await here.finder.find([(TOP, b"y")])
        assert ino_of(here, b"y") == second
        assert there.asked[-1] == [b"y"]

    run(tmp_path, step)


def test_an_answer_that_makes_no_sense_changes_nothing(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, _: Host) -> None:
        there.write(b"x")
        other: Sequence[Any] = [[[], namespace_root(2) + 5, b"", [], 0]]
        there.holder.confirm = lambda *_: _answer(other)  # type: ignore[method-assign]
        here.claims = [2]
        assert not await here.finder.find([(TOP, b"x")])
        there.holder.confirm = lambda *_: _answer([None, None])  # type: ignore[method-assign]
        await trio.sleep(2)
        assert not await here.finder.find([(TOP, b"x")])
        assert here.look(b"x") is None

    run(tmp_path, step)


def test_a_copy_that_was_removed_is_a_miss_until_it_is_written_anew(tmp_path: Path) -> None:
    async def step(here: Host, there: Host, third: Host) -> None:
        ino = there.write(b"x")
        told = there.look(b"x")
        assert told is not None
        (stone,) = removed(here.engine, here.stones, (1, b"x", told[1].ctime_ns), 1)
        here.claims = [2]
        assert not await here.finder.find([(TOP, b"x")])
        third.stones.take([stone])
        third.write(b"x")  # by a clock that is late
        third.engine.transact_now(lambda t: _set_ctime(t, ino_of(third, b"x"), 5))
        third.stones.renew([(1, b"x")])
        here.claims = [2, 3]
        assert await here.finder.find([(TOP, b"x")])
        assert ino_of(here, b"x") not in (None, ino)

    run(tmp_path, step)


async def _answer(told: Sequence[Any]) -> Any:
    return told


def _set_ctime(t: Transaction, ino: int, ns: int) -> None:
    inode = inodes.read_inode(t, ino)
    inode.ctime_ns = ns
    inodes.write_inode(t, ino, inode)


def ino_of(host: Host, path: bytes) -> int:
    found = host.look(path)
    assert found is not None
    return found[0]


def is_doubtful(host: Host, ino: int) -> bool:
    def fn(t: Transaction) -> bool:
        return host.finder.is_doubtful(t, ino, inodes.read_inode(t, ino))

    return host.engine.read_now(fn)


@pytest.mark.parametrize(
    ("space", "path"),
    [(1, b""), (1, b"x" * 5000), (1, b"a/" + b"x" * 482), (0, b"a"), (1 << 70, b"a")],
)
def test_paths_that_can_be_none_are_refused(tmp_path: Path, space: int, path: bytes) -> None:
    async def step(here: Host, _there: Host, _third: Host) -> None:
        with pytest.raises(Invalid):
            await here.holder.confirm(Party("c", 2, 1, "n"), [5.0, [[space, path]]])

    run(tmp_path, step)
