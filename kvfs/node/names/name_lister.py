"""Lists names of namespaces that are kept by their nodes: pages that their holders tell of, as one.

Invariants
- A node is asked by one request for its pages of all directories that are wanted at the time.
- One that does not answer in time is left out, and not asked again for a moment: counted, and told
  in the status. So a list ends, with what the others have.
- Names that were removed, as far as this node knows, are left out.
- So are those of a node on whose path a directory lets fewer users pass than the one here: a
  look-up would not lead to them.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec
import trio

from kvfs.base import detach
from kvfs.base.errors import KvfsError
from kvfs.node.names.name_protocol import LIST, MOST_ENTRIES, MOST_NAMES, Call, parse_told_pages
from kvfs.node.names.name_questions import DEADLINE_S, NameQuestions
from kvfs.node.names.tombstones import Tombstones, of_directory
from kvfs.tree.copies import told_names
from kvfs.tree.copies.peer_directories import DirectoryAccess, lets_no_more_pass
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldName, ToldPage

_ASKED: Final = 32
"""Nodes that are asked at a time."""
_LEAST: Final = 32
"""Entries that a node is asked for, at the least."""
_TOLD_S: Final = 60.0
"""Time for which the status tells of a node that was left out."""


class NameLister:
    """The lists of one node."""

    def __init__(
        self,
        holders: Callable[[Sequence[tuple[int, bytes]]], Awaitable[Sequence[Sequence[int]]]],
        claims: Callable[[int, bytes], Sequence[int] | None],
        questions: NameQuestions,
        call: Call,
        stones: Tombstones,
        heard: Callable[[int, Mapping[bytes, int]], None],
        directories: Callable[[int, bytes], Sequence[DirectoryAccess]],
    ) -> None:
        """`holders`: of each of some directories, the living nodes that may have names of it, by
        its namespace and path (empty: the namespace's own). `claims`: those that are said to hold
        a path, as a look-up asks them; None: that is not known here. `heard` is told paths of a
        namespace, and which node has each. `directories`: those of a path, as far as they are
        here."""
        self._holders = holders
        self._claims = claims
        self._questions = questions
        self._call = call
        self._stones = stones
        self._heard = heard
        self._directories = directories
        self._left_out: dict[int, float] = {}
        """Nodes that did not answer, and when."""
        self.counters = {"list_requests": 0, "list_requests_unanswered": 0}

    def left_out(self) -> list[int]:
        """Returns the nodes that lists of the last minute were made without."""
        since = trio.current_time() - _TOLD_S
        self._left_out = {node: at for node, at in self._left_out.items() if at > since}
        return sorted(self._left_out)

    async def pages(
        self, asked: Sequence[AskedPage], detail: Detail, *, hides: bool = True
    ) -> list[ToldPage]:
        """Returns what other nodes have of these parts of directories: of each some names, or that
        there are none up to a key. `hides`: without what lies behind directories that let fewer
        users pass than those here."""
        await detach.aside()
        found = [ToldPage([])] * len(asked)
        wanted = dict(enumerate(asked))
        while wanted:
            part = dict(islice(wanted.items(), MOST_NAMES))
            pages = await self._ask_all(part.values(), detail, hides=hides)
            for at, page in zip(part, pages, strict=True):
                found[at] = page
                if page.following and not page.names:
                    wanted[at] = msgspec.structs.replace(part[at], start=page.following)
                else:
                    del wanted[at]
        return found

    # ---- inside

    async def _ask_all(
        self, asked: Collection[AskedPage], detail: Detail, *, hides: bool
    ) -> list[ToldPage]:
        told: list[list[tuple[int, ToldPage]]] = [[] for _ in asked]
        by_node: dict[int, list[tuple[int, AskedPage]]] = {}
        holders = await self._holders([(each.namespace_id, each.path) for each in asked])
        for at, (each, holding) in enumerate(zip(asked, holders, strict=True)):
            nodes = [node for node in holding if not self._questions.rests(node)]
            share = each.limit if len(nodes) < 2 else max(2 * each.limit // len(nodes), _LEAST)
            for node in nodes:
                by_node.setdefault(node, []).append(
                    (at, msgspec.structs.replace(each, limit=share))
                )
        at_a_time = trio.Semaphore(_ASKED)

        async def ask(node: int, part: list[tuple[int, AskedPage]]) -> None:
            async with at_a_time:
                answer = await self._ask(node, [each for _, each in part], detail)
            for (at, _), page in zip(part, answer, strict=False):
                told[at].append((node, page))

        async with trio.open_nursery() as nursery:
            for node, questions in by_node.items():
                for part in _requests(questions):
                    nursery.start_soon(ask, node, part)
        if hides:
            told = [self._open_here(*each) for each in zip(asked, told, strict=True)]
        return [self._merged(*each) for each in zip(asked, told, strict=True)]

    async def _ask(self, node: int, asked: list[AskedPage], detail: Detail) -> list[ToldPage]:
        """Returns what the node tells; nothing if it does not answer."""
        self.counters["list_requests"] += 1
        params = msgspec.to_builtins([detail, asked], builtin_types=(bytes,))
        try:
            answer = await self._call(node, LIST, params, DEADLINE_S)
            return parse_told_pages(answer, asked, detail)
        except KvfsError:
            self.counters["list_requests_unanswered"] += 1
            self._left_out[node] = trio.current_time()
            self._questions.let_rest(node)
            return []

    def _open_here(
        self, asked: AskedPage, told: list[tuple[int, ToldPage]]
    ) -> list[tuple[int, ToldPage]]:
        if not asked.path:
            return told
        here = self._directories(asked.namespace_id, asked.path)
        return [each for each in told if all(map(lets_no_more_pass, here, each[1].directories))]

    def _merged(self, asked: AskedPage, told: Sequence[tuple[int, ToldPage]]) -> ToldPage:
        space, above = asked.namespace_id, asked.path + b"/" if asked.path else b""
        stones = self._stones

        def is_removed(name: ToldName) -> bool:
            path = above + name.key
            if path.endswith(b"/"):
                return stones.hides(space, of_directory(path[:-1]), name.changed_ns)
            return stones.hides(space, path, name.changed_ns, name.renews_ns)

        def first_asked(key: bytes, nodes: Sequence[int]) -> int:
            claiming = self._claims(space, above + key.removesuffix(b"/")) or ()
            return next((node for node in claiming if node in nodes), min(nodes))

        page, tellers = told_names.merged(told, is_removed, first_asked)
        paths = (above + each.key.removesuffix(b"/") for each in page.names)
        self._heard(space, dict(zip(paths, tellers, strict=True)))
        return page


def _requests(
    questions: Sequence[tuple[int, AskedPage]],
) -> Iterator[list[tuple[int, AskedPage]]]:
    """Divides the questions to one node into requests that it answers."""
    part: list[tuple[int, AskedPage]] = []
    entries = 0
    for each in questions:
        if part and entries + each[1].limit > MOST_ENTRIES:
            yield part
            part, entries = [], 0
        part.append(each)
        entries += each[1].limit
    yield part
