"""Lists of what several nodes hold: each name once and in order, whatever the pages, and in time
without those that do not answer. Nodes without mounts; time passes as they wait."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvfs.base.errors import Invalid, NotEmpty, Unavailable
from kvfs.cluster.handshake import Party
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_root, pack
from kvfs.node.names.directory_removals import DirectoryRemovals, remove
from kvfs.node.names.name_lister import NameLister
from kvfs.node.names.name_protocol import LIST, parse_asked_pages, parse_told_pages
from kvfs.node.names.tombstones import Tombstone
from kvfs.objects import listing, lookup
from kvfs.objects.listing import ListingPage
from kvfs.tree import inodes, name_escaping, namespaces, tree
from kvfs.tree.copies.peer_directories import DirectoryAccess, access, along
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldName, ToldPage
from kvfs.vfs.names.all_names import AllNames, PageWanted
from tests.contract.node.test_name_finder import TOP, Host, run
from tests.contract.tombs import removed

DEADLINE_S: Final = 1.0


class Listed(Host):
    """A host that lists, too."""

    def __init__(self, root: Path, number: int, others: dict[int, Host]) -> None:
        super().__init__(root, number, others)
        self._me = number
        self.heard: dict[bytes, int] = {}
        self.told: list[Tombstone] = []
        self.lister = NameLister(
            self._all_others,
            lambda _space, _path: self.claims,
            *(self.questions, self._call, self.stones, self._hear),
            lambda *path: self.engine.read_now(lambda t: access(along(t, *path))),
        )
        self.removals = DirectoryRemovals(
            *(number, self.lister, self.stones, lambda _space, _path: True, self.told.extend)
        )
        self.engine.transact_now(_keep_names_here)

    async def _all_others(self, directories: Sequence[tuple[int, bytes]]) -> list[list[int]]:
        return [[each for each in self._others if each != self._me] for _ in directories]

    async def list_others(self, asked: Sequence[AskedPage], detail: Detail) -> list[ToldPage]:
        return await self.lister.pages(asked, detail)

    def _hear(self, _space: int, tellers: Mapping[bytes, int]) -> None:
        self.heard.update(tellers)

    async def _call(
        self, node: int, method: str, params: Any, deadline_s: float, takes: int = 0
    ) -> Any:
        other = self._others[node]
        if method != LIST:
            return await super()._call(node, method, params, deadline_s, takes)
        if other.is_silent:
            await trio.sleep(deadline_s)
            raise Unavailable("no answer")
        await trio.sleep(0.001)
        return await other.holder.list_names(Party("c", node, 1, "n"), params)

    async def listed(
        self, look: Callable[[Transaction], Any], limit: int, *, is_deep: bool = True
    ) -> Any:
        """Run a list on the names of all nodes."""
        others = AllNames("records", limit, is_deep=is_deep)
        while True:
            try:
                return self.engine.read_now(lambda t: look(others.over(t)))
            except PageWanted as wanted:
                others.add(wanted, await self.lister.pages(wanted.asked, others.detail))

    async def children(self, limit: int = 7, directory: int = TOP) -> list[tuple[bytes, int]]:
        found: list[tuple[bytes, int]] = []
        last = b""
        while True:

            def look(t: Transaction, last: bytes = last) -> list[tree.Child]:
                return tree.list_children(t, directory, last, limit)

            page = await self.listed(look, limit, is_deep=False)
            found += [(each.name, each.ino) for each in page]
            if len(page) < limit:
                return found
            last = page[-1].key

    async def objects(self, limit: int, delimiter: bytes, prefix: bytes = b"") -> list[bytes]:
        """All keys and common prefixes, listed page by page."""
        found: list[bytes] = []
        after = b""
        while True:

            def look(t: Transaction, after: bytes = after) -> ListingPage:
                return listing.list_objects(
                    *(t, lookup.bucket_of(t, 1)),
                    prefix=prefix,
                    delimiter=delimiter,
                    start_after=after,
                    max_keys=limit,
                    boot=0,
                )

            page = await self.listed(look, limit + 1)
            found += sorted([*(each.key for each in page.objects), *page.prefixes])
            if not page.following:
                return found
            after = page.following


def _keep_names_here(t: Transaction) -> None:
    record = namespaces.get(t, 1)
    record.coherence = "peer"
    t.put(keys.namespace(1), pack(record))


def run_lists(tmp_path: Path, step: Callable[[Listed, Listed, Listed], Any]) -> None:
    run(tmp_path, step, Listed)


def test_all_keys_of_all_nodes_are_listed_once_and_in_order(tmp_path: Path) -> None:
    chance = random.Random(5)

    async def step(*hosts: Listed) -> None:
        held: set[bytes] = set()
        for _ in range(160):
            parts = [
                chance.choice([b"a", b"a!", b"b", b"a.b"]) for _ in range(chance.choice((0, 1, 2)))
            ]
            path = [*parts, b"f%d" % chance.randrange(60)]
            held.add(b"/".join(path))
            for host in chance.sample(hosts, chance.choice((1, 1, 2))):
                parent = TOP
                for part in parts:
                    found = host.engine.read_now(lambda t: tree.find(t, parent, part))  # noqa: B023
                    parent = found[0] if found else host.make_directory(part, parent)
                if host.engine.read_now(lambda t: tree.find(t, parent, path[-1])) is None:  # noqa: B023
                    host.write(path[-1], parent)
        for limit in (1, 3, 64, 1000):
            for host in hosts[:2]:
                assert await host.objects(limit, b"") == sorted(held)
                common = {key.partition(b"/")[0] + b"/" if b"/" in key else key for key in held}
                assert await host.objects(limit, b"/") == sorted(common)
        below = sorted(key for key in held if key.startswith(b"a/"))
        assert await hosts[2].objects(5, b"", b"a/") == below

    run_lists(tmp_path, step)


def test_the_names_of_a_node_with_few_stand_among_those_of_one_with_many(tmp_path: Path) -> None:
    async def step(here: Listed, many: Listed, few: Listed) -> None:
        held = [b"%05d" % number for number in range(300)]
        for name in held:
            many.write(name)
        for number in range(0, 30_000, 500):
            few.write(b"%05d.few" % number)
            held.append(b"%05d.few" % number)
        for limit in (40, 200, 1_000):
            assert await here.objects(limit, b"") == sorted(held)
            assert [name for name, _ in await here.children(limit)] == sorted(held)

    run_lists(tmp_path, step)


def test_a_directory_shows_each_name_once_and_its_own_first(tmp_path: Path) -> None:
    async def step(here: Listed, one: Listed, other: Listed) -> None:
        own = here.write(b"both")
        one.write(b"both")
        told = [each.write(b"twice") for each in (one, other)]
        here.claims = [3, 2]
        other.make_directory(b"empty")
        above = other.make_directory(b"full")
        other.write(b"below", above)
        assert await here.children() == [(b"both", own), (b"full", above), (b"twice", told[1])]
        assert here.heard[b"twice"] == 3
        assert {b"both", b"twice"} <= set(one.told_of)
        assert b"twice" in other.told_of
        here.claims = []
        assert dict(await here.children())[b"twice"] in told

    run_lists(tmp_path, step)


def test_what_was_removed_is_not_listed(tmp_path: Path) -> None:
    async def step(here: Listed, there: Listed, _: Listed) -> None:
        there.write(b"x")
        there.write(b"y")
        removed(here.engine, here.stones, (1, b"x", 2**62), 1)
        assert [name for name, _ in await here.children()] == [b"y"]

    run_lists(tmp_path, step)


def test_a_node_that_does_not_answer_is_left_out_in_time(tmp_path: Path) -> None:
    async def step(here: Listed, there: Listed, silent: Listed) -> None:
        for at in range(40):
            (there, silent)[at % 2].write(b"%02d" % at)
        silent.is_silent = True
        began = trio.current_time()
        found = await here.children(limit=3)
        assert len(found) == 20
        assert trio.current_time() - began < 2 * DEADLINE_S
        assert here.lister.left_out() == [3]
        assert here.lister.counters["list_requests_unanswered"] == 1
        silent.is_silent = False
        await trio.sleep(70)
        assert len(await here.children(limit=3)) == 40
        assert here.lister.left_out() == []

    run_lists(tmp_path, step)


def test_a_directory_goes_where_nobody_has_anything_in_it(tmp_path: Path) -> None:
    async def step(here: Listed, there: Listed, third: Listed) -> None:
        own = here.make_directory(b"d")
        others = [each.make_directory(b"d") for each in (there, third)]
        ino = there.write(b"x", others[0])
        with pytest.raises(NotEmpty):
            await here.removals.prepare(own, b"d")
        assert here.told == []
        removed(here.engine, here.stones, (1, b"d/x", 2**62), 1)
        await here.removals.prepare(own, b"d")
        (stone,) = here.told
        changes = [
            each.engine.transact_now(lambda t: remove(t, stone, 2**62)) for each in (there, third)
        ]
        assert changes[0] is None, "it holds a file still"
        assert changes[1] is not None
        assert third.look(b"d") is None
        assert there.look(b"d/x") is not None
        here.claims = [2]
        assert ino
        assert await here.finder.find([(TOP, b"d")]), "and is found, as it was changed since"

    run_lists(tmp_path, step)


def test_a_removed_directory_is_not_found_before_its_holder_heard_of_it(tmp_path: Path) -> None:
    async def step(here: Listed, there: Listed, _: Listed) -> None:
        own, directory = here.make_directory(b"d"), there.make_directory(b"d")
        there.write(b"x", directory)
        removed(here.engine, here.stones, (1, b"d/x", 2**62), 1)
        await here.removals.prepare(own, b"d")
        here.engine.transact_now(lambda t: tree.rmdir(t, TOP, b"d", 1, lambda _: True))
        here.claims = [2]
        assert not await here.finder.find([(TOP, b"d")])
        assert here.look(b"d") is None

    run_lists(tmp_path, step)


GOOD: Final = ToldName(b"x", TOP + 5, 0o100644, 1)


def test_who_may_not_pass_a_directory_elsewhere_sees_none_of_its_names(tmp_path: Path) -> None:
    """But it is not empty: its user here cannot remove what others have in it."""

    async def step(here: Listed, there: Listed, third: Listed) -> None:
        at = {host: host.make_directory(b"d") for host in (here, there, third)}
        for host, mode in ((here, 0o755), (there, 0o700), (third, 0o755)):
            changes = inodes.AttributeChanges(mode=mode)
            host.engine.transact_now(
                lambda t, at=at[host], changes=changes: inodes.set_attributes(t, at, changes, 1)
            )
        there.write(b"secret", at[there])
        there.write(b"deep", there.make_directory(b"e", at[there]))
        third.write(b"open", at[third])
        below = here.make_directory(b"e", at[here])
        assert [name for name, _ in await here.children(directory=at[here])] == [b"e", b"open"]
        assert await here.children(directory=below) == []
        assert await here.objects(9, b"") == [b"d/open"]
        with pytest.raises(NotEmpty):
            await here.removals.prepare(below, b"d/e")

    run_lists(tmp_path, step)


@pytest.mark.parametrize(
    "page",
    [
        ToldPage([ToldName(b"a", TOP + 5, 0o100644, 1)]),
        ToldPage([GOOD, GOOD]),
        ToldPage([ToldName(b"x/y", TOP + 5, 0o100644, 1)]),
        ToldPage([ToldName(b"x/", TOP + 5, 0o100644, 1)]),
        ToldPage([ToldName(b"x\0v", TOP + 5, 0o100644, 1)]),
        ToldPage([ToldName(b"x", namespace_root(2) + 5, 0o100644, 1)]),
        ToldPage([ToldName(b"x" * 482, TOP + 5, 0o100644, 1)]),
        ToldPage([GOOD], following=b"x"),
        ToldPage([], following=b"b"),
        ToldPage([GOOD], directories=[DirectoryAccess(0o40755, 0, 0)]),
    ],
)
def test_a_page_that_makes_no_sense_is_refused(page: ToldPage) -> None:
    asked = [AskedPage(1, b"", b"b", 10)]
    with pytest.raises(Invalid):
        names = [(each.key, each.ino, each.mode, each.changed_ns) for each in page.names]
        directories = [(each.mode, each.uid, each.gid) for each in page.directories]
        parse_told_pages([[names, page.following, 0, directories]], asked, "names")


@pytest.mark.parametrize(
    "params",
    [
        ["names", [[1, b"", b"", 0]]],
        ["names", [[1, b"", b"", 9000]]],
        ["names", [[0, b"", b"", 10]]],
        ["all", [[1, b"", b"", 10]]],
        ["names", [[1, b"", b"x" * 600, 10]]],
        ["names", [[1, b"", b"", 1]] * 129],
    ],
)
def test_a_question_that_makes_no_sense_is_refused(params: object) -> None:
    with pytest.raises(Invalid):
        parse_asked_pages(params)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"l" * 300, b"m" * 470, b"100%", b"a%20b"])
def test_names_that_a_mount_shows_escaped_are_found(tmp_path: Path, name: bytes) -> None:
    async def step(here: Listed, there: Listed, _: Listed) -> None:
        above = there.make_directory(b"d")
        ino = there.write(b"x", above)
        there.engine.transact_now(lambda t: t.delete(keys.file_entry(above, b"x")))
        there.engine.transact_now(lambda t: t.put(keys.file_entry(above, name), keys.pack_u64(ino)))
        here.claims = [2]
        assert await here.finder.find([(TOP, b"d")])
        directory = here.look(b"d")
        assert directory is not None
        shown = there.engine.read_now(lambda t: name_escaping.shown(t, above, name))
        assert shown is not None
        here.unclaimed = {b"d/" + shown} - {b"d/" + name}
        assert await here.finder.find([(directory[0], shown)])
        found = here.engine.read_now(lambda t: tree.find(t, directory[0], shown))
        assert found is not None
        assert found[0] == ino

    run_lists(tmp_path, step)
