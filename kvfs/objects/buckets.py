"""Buckets: namespaces, with settings that only their readers understand. No I/O here."""

from typing import Final, NamedTuple

from kvfs.base.errors import Exists
from kvfs.meta import delegations, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE
from kvfs.objects import mutations
from kvfs.objects.lookup import Bucket, find_bucket
from kvfs.objects.multipart import upload_transactions
from kvfs.objects.mutations import Moment
from kvfs.objects.object_errors import BucketExists, BucketNotEmpty
from kvfs.objects.object_keys import COMPLETED
from kvfs.session.session import Author
from kvfs.tree import namespaces
from kvfs.tree.entries import lose_link, touch
from kvfs.tree.inodes import read_inode
from kvfs.vfs.post_commit import Changed

_MAX_SETTING_NAME: Final = 255


class ListedBucket(NamedTuple):
    """A bucket in a list."""

    name: bytes
    created_ns: int
    kind: str
    """The kind of the namespace: durable or cache."""


def create(
    t: Transaction, name: bytes, kind: str, mode: int, author: Author, changed: Changed
) -> Bucket:
    """Makes a bucket, its directory with these permissions.

    Raises BucketExists, Invalid, NameTooLong, NoSpace."""
    try:
        namespaces.create(
            t, name, mode=mode, kind=kind, uid=author.uid, gid=author.gid, now=author.now
        )
    except Exists as error:
        raise BucketExists(str(error)) from None
    changed.name(ROOT_INODE, name)
    return find_bucket(t, name)


def remove(t: Transaction, name: bytes, moment: Moment, changed: Changed) -> None:
    """Removes a bucket that holds nothing but empty directories, and its settings. Raises
    NoSuchBucket, BucketNotEmpty, `delegations.Delegated`."""
    bucket = find_bucket(t, name)
    _remove_completed(t, bucket, moment, changed)
    _remove_empty(t, bucket.root, name, moment, changed)
    delegations.check_none(t, bucket.id)
    namespaces.forget(t, bucket.id, name, moment.now)
    top = read_inode(t, bucket.root)
    removed = lose_link(t, bucket.root, top, (ROOT_INODE, name), moment.now, lambda _: True)
    changed.name(ROOT_INODE, name, removed)


def describe(t: Transaction, name: bytes) -> ListedBucket:
    """Raises NoSuchBucket."""
    bucket = find_bucket(t, name)
    return _describe(t, bucket.id)


def list_all(t: Transaction) -> list[ListedBucket]:
    """Returns every namespace, in the order of their names; the caller decides which of them are
    legal names of buckets."""
    prefix = keys.entries(ROOT_INODE)
    return [
        _describe(t, keys.unpack_u64(value) >> 48)
        for _, value in t.scan(prefix, keys.after(prefix))
    ]


def get_setting(t: Transaction, bucket: Bucket, name: str) -> bytes | None:
    """Returns the value of a setting; None if it is not set."""
    return t.get(_setting(bucket, name))


def put_setting(t: Transaction, bucket: Bucket, name: str, value: bytes) -> None:
    t.put(_setting(bucket, name), value)


def delete_setting(t: Transaction, bucket: Bucket, name: str) -> bool:
    """Deletes a setting; returns whether it was set."""
    return t.delete(_setting(bucket, name))


def settings(t: Transaction, bucket: Bucket) -> dict[str, bytes]:
    """Returns all settings."""
    return {name.decode(): value for name, value in namespaces.settings(t, bucket.id).items()}


def _setting(bucket: Bucket, name: str) -> bytes:
    assert 0 < len(name.encode()) <= _MAX_SETTING_NAME, name
    return keys.setting(bucket.id, name.encode())


def _describe(t: Transaction, number: int) -> ListedBucket:
    record = namespaces.get(t, number)
    created = record.created_ns
    if not created:
        created = read_inode(t, number << 48 | ROOT_INODE).mtime_ns
    return ListedBucket(record.name, created, record.kind)


def _remove_completed(t: Transaction, bucket: Bucket, moment: Moment, changed: Changed) -> None:
    value = t.get(keys.directory_entry(bucket.root, COMPLETED))
    if value is not None:
        directory = keys.unpack_u64(value)
        for name, ino in upload_transactions.notes(t, directory):
            upload_transactions.remove_note(t, directory, name, ino)
        _remove_directory(t, bucket.root, COMPLETED, directory, moment, changed)


def _remove_empty(
    t: Transaction, directory: int, name: bytes, moment: Moment, changed: Changed
) -> None:
    """Removes the directories below; raises BucketNotEmpty at the first entry that is none."""
    prefix = keys.entries(directory)
    below: list[tuple[bytes, int]] = []
    for key, value in t.scan(prefix, keys.after(prefix)):
        if not key.endswith(b"/"):
            shown = name.decode(errors="backslashreplace")
            raise BucketNotEmpty(f"the bucket {shown} is not empty")
        below.append((key[len(prefix) : -1], keys.unpack_u64(value)))
    for child, ino in below:
        _remove_empty(t, ino, name, moment, changed)
        _remove_directory(t, directory, child, ino, moment, changed)


def _remove_directory(
    t: Transaction, parent: int, name: bytes, ino: int, moment: Moment, changed: Changed
) -> None:
    t.delete(keys.directory_entry(parent, name))
    touch(t, parent, read_inode(t, parent), moment.now, -1)
    removed = lose_link(t, ino, read_inode(t, ino), (parent, name), moment.now, lambda _: True)
    mutations.tell(t, changed, parent, name + b"/", removed)
