"""A tree of names in plain objects, written from POSIX and not from the code: what `kvfs.tree`
is compared with. An operation that is refused returns the error's class and changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kvfs.base import errors

Refusal = type[errors.KvfsError] | None


@dataclasses.dataclass(eq=False)
class Node:
    """An inode."""

    ino: int
    directory: bool
    mtime: int
    ctime: int
    children: dict[bytes, Node] = dataclasses.field(default_factory=dict)
    names: set[tuple[int, bytes]] = dataclasses.field(default_factory=set)
    """(inode of the directory, name) of each link."""
    parent: Node | None = None
    """Of a directory."""
    blocks: int = 0
    published: bool = False
    sealed: bool = False
    removed: bool = False

    @property
    def nlink(self) -> int:
        if not self.directory:
            return len(self.names)
        if self.removed:
            return 0
        return 2 + sum(child.directory for child in self.children.values())


class PlainTree:
    """The root holds namespaces; nothing moves between them."""

    def __init__(self, root: int, now: int) -> None:
        self.root = Node(root, True, now, now)
        self.root.parent = self.root
        self.nodes: dict[int, Node] = {root: self.root}
        self.orphans: set[int] = set()
        self.held: set[int] = set()

    def walk(self, node: Node) -> Iterator[Node]:
        yield node
        for child in node.children.values():
            if child.directory:
                yield from self.walk(child)

    # What may be refused comes before what changes, in the order in which Linux asks.

    def add(self, parent: Node, name: bytes, ino: int, directory: bool, now: int) -> Refusal:
        if parent is self.root and not directory:
            return errors.NotPermitted
        if parent.removed:
            return errors.NotFound
        if name in parent.children:
            return errors.Exists
        node = Node(ino, directory, now, now)
        self.nodes[ino] = node
        self._enter(parent, name, node, now)
        return None

    def link(self, node: Node, parent: Node, name: bytes, now: int) -> Refusal:
        if node.directory or parent is self.root:
            return errors.NotPermitted
        if space(parent) != space(node):
            return errors.CrossNamespace
        if parent.removed:
            return errors.NotFound
        if name in parent.children:
            return errors.Exists
        self.orphans.discard(node.ino)
        self._enter(parent, name, node, now)
        node.ctime = now
        return None

    def unlink(self, parent: Node, name: bytes, now: int) -> Refusal:
        node = parent.children.get(name)
        if node is None:
            return errors.NotFound
        if node.directory:
            return errors.IsADirectory
        self._leave(parent, name, now)
        self._lost(node, now)
        return None

    def rmdir(self, parent: Node, name: bytes, now: int) -> Refusal:
        node = parent.children.get(name)
        if node is None:
            return errors.NotFound
        if not node.directory:
            return errors.NotADirectory
        if node.children:
            return errors.NotEmpty
        self._leave(parent, name, now)
        self._lost(node, now)
        return None

    def replace(self, parent: Node, name: bytes, ino: int, now: int) -> Refusal:
        old = parent.children.get(name)
        if old is not None and old.directory:
            return errors.IsADirectory
        if parent is self.root:
            return errors.NotPermitted
        if parent.removed:
            return errors.NotFound
        if old is not None:
            self.unlink(parent, name, now)
        return self.add(parent, name, ino, False, now)

    def rename(
        self, old: Node, old_name: bytes, new: Node, new_name: bytes, flags: int, now: int
    ) -> Refusal:
        if flags == 3:
            return errors.Invalid
        node, target = old.children.get(old_name), new.children.get(new_name)
        if node is None:
            return errors.NotFound
        refusal = self._refuse_crossing(node, old, new)
        if refusal is not None:
            return refusal
        if flags == 2:
            return self._exchange(node, old, old_name, target, new, new_name, now)
        if target is not None and flags == 1:
            return errors.Exists
        if target is node:
            return None
        if new.removed:
            return errors.NotFound
        if self._within(new, node):
            return errors.Invalid
        if target is not None:
            if node.directory and not target.directory:
                return errors.NotADirectory
            if target.directory and not node.directory:
                return errors.IsADirectory
            if target.children:
                return errors.NotEmpty
            self._leave(new, new_name, now)
            self._lost(target, now)
        self._leave(old, old_name, now)
        self._enter(new, new_name, node, now)
        node.ctime = now
        return None

    def publish(self, node: Node, blocks: int, now: int) -> None:
        node.published, node.sealed, node.blocks = True, False, blocks
        node.mtime = now
        node.ctime = max(node.ctime, now)

    def evict(self, node: Node, now: int) -> None:
        if not node.names:
            return
        for parent, name in sorted(node.names):
            self._leave(self.nodes[parent], name, now)
        node.ctime = now
        self.orphans.add(node.ino)

    def release(self, ino: int) -> None:
        self.held.discard(ino)
        if ino in self.orphans:
            self.orphans.remove(ino)
            del self.nodes[ino]

    def _refuse_crossing(self, node: Node, old: Node, new: Node) -> Refusal:
        if (old is self.root) == (new is self.root):
            same = old is self.root or space(old) == space(new)
            return None if same else errors.CrossNamespace
        if new is self.root:
            return errors.CrossNamespace if node.directory else errors.NotPermitted
        return errors.Invalid if space(node) == space(new) else errors.CrossNamespace

    def _within(self, inner: Node, outer: Node) -> bool:
        """Whether `inner` is `outer` or below it."""
        above: Node | None = inner
        while above is not None and above is not self.root:
            if above is outer:
                return True
            above = above.parent
        return False

    def _exchange(
        self,
        node: Node,
        old: Node,
        old_name: bytes,
        target: Node | None,
        new: Node,
        new_name: bytes,
        now: int,
    ) -> Refusal:
        if target is None:
            return errors.NotFound
        if target is node:
            return None
        if self._within(new, node) or self._within(old, target):
            return errors.Invalid
        self._leave(old, old_name, now)
        self._leave(new, new_name, now)
        self._enter(new, new_name, node, now)
        self._enter(old, old_name, target, now)
        node.ctime = target.ctime = now
        return None

    def _enter(self, parent: Node, name: bytes, node: Node, now: int) -> None:
        parent.children[name] = node
        parent.mtime = parent.ctime = now
        node.names.add((parent.ino, name))
        if node.directory:
            node.parent = parent

    def _leave(self, parent: Node, name: bytes, now: int) -> None:
        node = parent.children.pop(name)
        node.names.discard((parent.ino, name))
        parent.mtime = parent.ctime = now

    def _lost(self, node: Node, now: int) -> None:
        """A link has gone; perhaps it was the last."""
        node.ctime = now
        if node.names:
            return
        node.removed, node.parent = node.directory, None
        if node.ino in self.held:
            self.orphans.add(node.ino)
        else:
            del self.nodes[node.ino]


def space(node: Node) -> int:
    """The id of a node's namespace: the high bits of its number."""
    return node.ino >> 48
