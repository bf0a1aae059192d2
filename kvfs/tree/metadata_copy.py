"""Moves metadata between engines: the content of a copy, and its completion when it is whole."""

from kvfs.base.errors import Exists, NotFound, NotSupported
from kvfs.meta import engine_copy, keys, schema
from kvfs.meta.engine import Transaction
from kvfs.meta.engine_copy import Blocking, CopyResult, Progress
from kvfs.meta.records import ROOT_INODE
from kvfs.tree import namespaces
from kvfs.tree.inodes import read_inode


def copy_all(
    source: Blocking, target: Blocking, *, replace: bool, progress: Progress
) -> CopyResult:
    """Copies all metadata. Raises Exists if the target holds any and `replace` is not set;
    Conflict, Corrupt, as `engine_copy.copy` does."""
    part = engine_copy.whole()
    schema = source.read_now(_checked)

    def begin(t: Transaction) -> None:
        if not replace:
            engine_copy.refuse_used(t, part)
        t.put(part.mark, b"")
        t.delete(keys.VERSION)

    def finish(t: Transaction) -> None:
        t.put(keys.VERSION, schema)
        t.delete(part.mark)

    target.transact_now(begin)
    copied = engine_copy.copy(source, target, part, progress)
    target.transact_now(finish)
    return copied


def copy_namespace(
    source: Blocking,
    target: Blocking,
    name: bytes,
    *,
    replace: bool,
    now: int,
    progress: Progress,
) -> CopyResult:
    """Copies one namespace, which keeps its id: inode numbers hold it. The target may be empty.
    Raises NotFound, Exists if the name or the id is taken there, Conflict, Corrupt, NotSupported
    (the target is of an earlier schema)."""
    source.read_now(_checked)
    namespace_id, record = source.read_now(lambda t: namespaces.by_name(t, name))
    root = source.read_now(lambda t: read_inode(t, ROOT_INODE))
    part = engine_copy.of_namespace(namespace_id)

    has_tags = source.read_now(schema.has_tags)

    def begin(t: Transaction) -> None:
        engine_copy.refuse_unfinished(t, besides=part.mark)
        namespaces.format(t, now, root.uid, root.gid)
        if has_tags and not schema.has_tags(t):
            raise NotSupported(
                "the target's metadata have the form of an earlier version than the source's, and"
                " its nodes may be of that: finish its upgrade first (`kvfs node finish-upgrade`,"
                " or start its lone node once)"
            )
        _make_room(t, namespace_id, name, replace=replace, part=part, now=now)
        t.put(part.mark, b"")

    def finish(t: Transaction) -> None:
        namespaces.adopt(t, namespace_id, record, now)
        t.delete(part.mark)

    target.transact_now(begin)
    copied = engine_copy.copy(source, target, part, progress)
    target.transact_now(finish)
    return copied


def _checked(t: Transaction) -> bytes:
    """Returns the schema version of metadata that are whole. Raises Corrupt, NotSupported,
    Conflict."""
    engine_copy.refuse_unfinished(t)
    namespaces.check_format(t)
    return t.get(keys.VERSION) or b""


def _make_room(
    t: Transaction,
    namespace_id: int,
    name: bytes,
    *,
    replace: bool,
    part: engine_copy.EnginePart,
    now: int,
) -> None:
    shown = name.decode(errors="backslashreplace")
    try:
        found, _ = namespaces.by_name(t, name)
    except NotFound:
        found = None
    if found is not None and found != namespace_id:
        raise Exists(
            f"the target has another namespace '{shown}' (id {found}, not {namespace_id}):"
            " rename or remove it there first"
        )
    if found is None and t.get(keys.namespace(namespace_id)) is not None:
        other = namespaces.get(t, namespace_id).name.decode(errors="backslashreplace")
        raise Exists(
            f"the id {namespace_id} of '{shown}' is that of '{other}' in the target:"
            " copy to another one"
        )
    if not replace:
        engine_copy.refuse_used(t, part)
    if found is not None:
        namespaces.forget(t, namespace_id, name, now)
