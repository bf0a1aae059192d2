"""What lies on disks and in engines: the bytes of one example of each thing that is kept, with what
they mean beside them. A store of this version must be readable by the next, so a change here asks
for another number of the format, or for a field at the end of a record.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from kvfs.admin.backup.manifest import FORMAT as BACKUPS
from kvfs.base.media import parse_shared, parse_tier
from kvfs.base.version import CONTROL, KEEPS_TAGS, PROTOCOL
from kvfs.cluster import node_identity
from kvfs.cluster.node_identity import Kept
from kvfs.cluster.node_records import Claim, NodeRecord, Words
from kvfs.cluster.secrets import Secret, Secrets
from kvfs.datastore import (
    index,
    known_directories,
    layout,
    places,
    quarantine_directory,
    removal_reasons,
)
from kvfs.datastore.files import DataFiles, Description
from kvfs.datastore.leases.table import ReadLeaseTable
from kvfs.datastore.leases.taker import LeaseTaker
from kvfs.datastore.quarantine_directory import Reason
from kvfs.datastore.replica_clock import HeardWriter
from kvfs.meta import delegations, exclusive, keys, schema
from kvfs.meta.lmdb import checkpoint_seal, journal
from kvfs.meta.lmdb.journal import Position
from kvfs.meta.lmdb.trust_state import StateFile, TrustState
from kvfs.meta.records import AccessKey, Flag, Holding, Inode, Namespace, Tag, Usage, User, pack
from kvfs.meta.redis import identity
from kvfs.meta.redis.scripts import ENTRY_VERSION
from kvfs.meta.replica.private_group import InodeWrites
from kvfs.meta.replica.replica_mark import ReplicaMark
from kvfs.node.append_leases import LeaseHolder
from kvfs.node.homes.home_record import HomeRecord
from kvfs.objects import object_attributes, versions
from kvfs.objects.multipart import upload_transactions
from kvfs.policy.byte_range_locks import ByteRangeLock, LockOwner
from kvfs.tree import etags, notices
from kvfs.tree.changes import Change
from kvfs.tree.copies import cold_copies
from s3api.storage import bucket_settings
from tests.contract.memory_engine import MemoryEngine
from tests.golden.golden import hold
from tests.golden.hexadecimal import shown

NODE: Final = keys.pack_node(7)
INO: Final = 3 << 48 | 42
TIME: Final = 1_700_000_000_123_456_789
SUM: Final = bytes(range(16))
_encode: Final = msgspec.msgpack.encode

INODE: Final = Inode(
    mode=0o100644,
    uid=1000,
    gid=1001,
    nlink=1,
    size=5_000_000,
    blocks=9768,
    atime_ns=TIME,
    mtime_ns=TIME + 1,
    ctime_ns=TIME + 2,
    parent=3 << 48 | 1,
    name=b"block",
    flags=Flag.PUBLISHED | Flag.SEALED,
    version=2,
    boot=12345,
    rdev=0,
    target=b"",
    checksum=SUM,
    btime_ns=TIME - 1,
    tags={Tag.ETAG: b"tag", 4711: b"of a later version"},
)
RECORDS: Final[Sequence[tuple[str, msgspec.Struct]]] = (
    ("inode", INODE),
    (
        "namespace",
        Namespace(
            name=b"cache",
            kind="cache",
            capacity=1 << 30,
            created_ns=TIME,
            coherence="cache",
            replicas=1,
            acknowledge="sync",
            media=["ram", "ssd"],
            cold=True,
            locks="cluster",
            etag="fast",
        ),
    ),
    ("usage of a namespace", Usage(bytes=4096, inodes=3)),
    ("what a node holds of a file", Holding(version=2, blocks=b"\x05")),
    ("user", User(access_keys=["AKEXAMPLE"], created_ns=TIME, enabled=False, policy="{}")),
    ("access key", AccessKey(user="main", secret=b"encrypted", created_ns=TIME)),
    (
        "node",
        NodeRecord(
            number=7,
            name="n7",
            store="store",
            incarnation=3,
            peer="h:9002",
            zone="z",
            rack="r",
            capacity_bytes=1 << 30,
            media=("ram", "ssd"),
            version="0.1.0",
            protocol=1,
            state="draining",
        ),
    ),
    (
        "words of a node's lease",
        Words(
            name="n7",
            protocol=1,
            version="0.1.0",
            boot=12345,
            free_bytes=1,
            capacity_bytes=2,
            load=0.5,
            lacking=3,
            obstacle="why",
            place="802.2a",
        ),
    ),
    ("claim", Claim(node=7, incarnation=3)),
    ("homes of names", HomeRecord(number=4, zones={7: "a", 9: ""})),
    ("lease of who appends", LeaseHolder(7, 3)),
    ("lock", ByteRangeLock(LockOwner(7, 3, 99), True, 0, 4095, 4321)),
    ("mirror's mark", ReplicaMark(cluster="c", node=7, position=5, token=b"t", filled=b"i")),
    ("group of a mirror", InodeWrites({b"i"}, {b"s": b"1"}, True, 1.5, {b"e": b"2"})),
    ("commit in the journal", journal.Record(6, b"", [b"key", b"value", b"gone", None])),
    ("index entry", index.IndexEntry(version=2, clock=TIME, chunks=SUM, blocks=8)),
    (
        "data file about itself",
        Description(
            ino=INO,
            version=2,
            size=5_000_000,
            checksum=SUM,
            path=b"cache/block",
            mode=0o100644,
            uid=1000,
            gid=1001,
            mtime_ns=TIME,
            described_ns=TIME,
            namespace=b"cache",
            kind="cache",
            others=[b"cache/other"],
            xattrs={b"user.note": b"n"},
        ),
    ),
)

KEYS: Final[Sequence[tuple[str, bytes]]] = (
    ("schema version", keys.VERSION),
    ("namespace 3", keys.namespace(3)),
    ("setting `policy` of bucket 3", keys.setting(3, b"policy")),
    ("usage of namespace 3", keys.usage(3)),
    ("next number in namespace 3", keys.counter(3)),
    ("inode", keys.inode(INO)),
    ("entry of a file", keys.file_entry(INO, b"name")),
    ("entry of a directory", keys.directory_entry(INO, b"name")),
    ("link back", keys.backlink(INO, 1, b"name")),
    ("extended attribute", keys.xattr(INO, b"user.note")),
    ("not sealed", keys.unsealed(INO)),
    ("not published", keys.unpublished(INO)),
    ("reserved number", keys.reserved(INO)),
    ("orphan", keys.orphan(INO)),
    ("later times of a directory", keys.times(INO)),
    ("placement", keys.placement(INO, NODE)),
    ("placement, by node", keys.held(NODE, INO)),
    ("delegation", keys.delegation(3, NODE)),
    ("exclusive delegation", keys.exclusive(3)),
    ("usage of a node", keys.node_usage(3, NODE)),
    ("step of a node in a change of coherence", keys.switched(3, NODE)),
    ("node", keys.node(7)),
    ("locks on a whole file", keys.locks(INO, True)),
    ("locks on ranges", keys.locks(INO, False)),
    ("lease of who appends", keys.append_lease(INO)),
    ("claim", keys.claim("repair")),
    ("homes of names", keys.HOMES),
    ("object of the cold tier", keys.cold_object(INO, 2, SUM)),
    ("user", keys.user("main")),
    ("access key", keys.access_key("AK")),
    ("notice", keys.notice(TIME, b"12345678")),
    ("unfinished copy", keys.copying(3)),
    ("place of namespace 3, which has a shard of its own", keys.place(3)),
    ("change over two shards that is under way", keys.INTENTION),
    ("last change over two shards that reached namespace 3", keys.reached(3)),
    ("position in the journal, of this node alone", journal.POSITION_KEY),
    ("number of the last commit, of this node alone", journal.GENERATION_KEY),
    ("mirror's mark, of this node alone", journal.REPLICA_KEY),
    ("the index's database", index.NAME),
)


def test_keys() -> None:
    hold("keys.txt", itertools.chain.from_iterable(shown(name, key) for name, key in KEYS))


def test_records() -> None:
    hold("records.txt", _records())


@pytest.mark.parametrize(("name", "record"), RECORDS, ids=[name for name, _ in RECORDS])
def test_a_record_without_its_later_fields_is_read(name: str, record: msgspec.Struct) -> None:
    """As a version wrote it that did not have them."""
    fields = enumerate(msgspec.structs.fields(record), 1)
    needed = max((number for number, each in fields if each.required), default=0)
    values = msgspec.msgpack.decode(_encode(record))[:needed]
    found = msgspec.msgpack.decode(_encode(values), type=type(record))
    assert msgspec.to_builtins(found)[:needed] == msgspec.to_builtins(record)[:needed], name


@pytest.mark.parametrize(("name", "record"), RECORDS, ids=[name for name, _ in RECORDS])
def test_a_record_with_further_fields_is_read(name: str, record: msgspec.Struct) -> None:
    """As the next version writes it, which adds some at the end."""
    values = [*msgspec.msgpack.decode(_encode(record)), "further", {"more": 1}]
    assert msgspec.msgpack.decode(_encode(values), type=type(record)) == record, name


def test_other_values(tmp_path: Path) -> None:
    """What is kept and is no record."""
    hold("values.txt", itertools.chain(_values(), _index(), _files(tmp_path)))


def test_journal(tmp_path: Path) -> None:
    hold("journal.txt", _journal(tmp_path))


def test_versions() -> None:
    """The numbers by which another version is told."""
    lines = (
        f"store: {layout.FORMAT}",
        f"schema of the metadata: {keys.SCHEMA}",
        f"layout in Redis: {identity.SCHEMA}",
        f"entries of the log: {ENTRY_VERSION}",
        f"between nodes: {PROTOCOL}",
        f"control socket: {CONTROL}",
        f"both, from which on tags are kept: {KEEPS_TAGS}",
        f"data file about itself: {Description.__struct_defaults__[0]}",
        f"backups: {BACKUPS}",
    )
    hold("versions.txt", lines)


def _records() -> Iterator[str]:
    for name, record in RECORDS:
        packed = pack(record)
        assert msgspec.msgpack.decode(packed, type=type(record)) == record
        fields = record.__struct_fields__
        values = map(_plain, msgspec.structs.astuple(record))
        yield from shown(name, packed, *map("{}: {!r}".format, fields, values))


def _plain(value: object) -> object:
    return msgspec.structs.astuple(value) if isinstance(value, msgspec.Struct) else value


def _values() -> Iterator[str]:
    yield from shown("schema version", schema.PRESENT, str(keys.SCHEMA))
    yield from shown("schema version", schema.RISING, "on the way there")
    for name, number in sorted(vars(Tag).items(), key=str):
        if isinstance(number, int):
            yield f"tag {number}: {name}"
    yield from shown("inode of an entry", keys.pack_u64(INO), hex(INO))
    yield from shown("number of a node", NODE, "7")
    yield from shown("delegation", delegations.HELD, "held")
    yield from shown("delegation", delegations.RECALLED, "recalled")
    alone = NODE + keys.pack_u64(9)
    yield from shown("exclusive delegation", alone + exclusive.HELD, "held by node 7, the ninth")
    yield from shown("exclusive delegation", alone, "asked back")
    yield from shown("notice", _noticed(), "directory 1, entry 'name', its last inode 0x2a")
    yield from shown(
        "object on its way to the cold tier", _uploading(), "and the number of its node, here none"
    )
    yield from shown("ETag", etags.packed("abc", INODE), "ETag, size and mtime")
    yield f"ETag that nobody gave: {etags.computed(INO, INODE)}"
    yield from shown("id of a version", versions.make(TIME, null=True), f"at {TIME}, null")
    assert versions.time_of(versions.make(TIME, null=False)) == TIME
    entry = versions.entry_name(b"key", versions.make(TIME, null=True))
    yield from shown("entry of a version", entry)
    yield from shown("part of an upload", upload_transactions.part_name(7), "the seventh")
    yield from shown(
        "setting of a bucket", bucket_settings.pack({"Status": "Enabled"}), "versioning"
    )
    names = ("content-type", "meta.note", "checksum.crc32", "tagging", "retention", "legal-hold")
    for name in (*names, "acl", "owner", "storage", "encryption", "parts"):
        yield f"attribute of an object: {name}: {object_attributes.attribute(name).decode()}"
    yield f"attribute of an object: version: {object_attributes.VERSION.decode()}"
    yield f"attribute of an object: ETag: {etags.ETAG.decode()}"


def _noticed() -> bytes:
    engine = MemoryEngine()
    change = Change(1, b"name", 42)
    engine.transact_now(lambda t: notices.post(t, [change], TIME))
    (notice,) = engine.read_now(lambda t: notices.waiting(t, TIME + 1, 9))
    assert notice.changes == [change]
    value = engine.read_now(lambda t: t.get(notice.key))
    assert value is not None
    return value


def _uploading() -> bytes:
    engine = MemoryEngine()
    wanted = cold_copies.Object(INO, 2, SUM)
    inode = msgspec.structs.replace(INODE, boot=0)

    def begin(t: Any) -> bytes | None:
        t.put(keys.inode(INO), pack(inode))
        assert cold_copies.begin(t, wanted)
        found: bytes | None = t.get(keys.cold_object(*wanted))
        return found

    value = engine.transact_now(begin)
    assert value is not None
    return value


def _index() -> Iterator[str]:
    """All that it keeps of one file."""
    engine = MemoryEngine()
    table = index.Index(engine)
    table.store([index.Sealed(INO, 2, SUM, 8)])
    table.scrub_from(INO)
    entry = table.get(INO)
    assert entry is not None
    for key, value in engine.read_now(lambda t: list(t.scan(b"", b"\xff"))):
        clock = entry.clock.to_bytes(8, "big")
        yield from shown("index: key", key.replace(clock, TIME.to_bytes(8, "big")))
        if key[:1] == b"f":
            value = pack(msgspec.structs.replace(entry, clock=TIME))
        yield from shown("index: value", value)


def _files(here: Path) -> Iterator[str]:
    identity_ = layout.StoreFormat(layout.FORMAT, "S", "N")
    yield f"format: {msgspec.json.encode(identity_).decode()}"
    store = layout.create_store(here / "store")
    assert msgspec.json.decode((store.root / "format").read_bytes(), type=layout.StoreFormat)
    node_identity.keep_node(store, Kept("c", 7, 3))
    yield f"node: {(store.root / 'node').read_text().strip()}"
    node_identity.keep_secrets(store.root / "cluster.key", Secrets([Secret("c" * 16, b"k" * 32)]))
    yield f"cluster.key: {(store.root / 'cluster.key').read_text().strip()}"
    given = [parse_tier("ssd=/d:1GiB"), parse_shared("n=/s:owner=root")]
    yield f"places: {msgspec.json.encode(given).decode()}"
    places.write_targets(store, {3: "/d"})
    yield f"run/targets: {(store.run / 'targets').read_text()}"
    store.mark_recovered(12345)
    yield f"recovered: {(store.root / 'recovered').read_text()}"
    HeardWriter(store.heard).tell(1.5, {3: 2.5})
    text = "1.5 s of CLOCK_BOOTTIME, namespace 3: 2.5 s"
    yield from shown("run/heard", store.heard.read_bytes(), text)
    known_directories.KnownDirectories(store.known).close()
    yield f"run/known: {store.known.stat().st_size} bytes"
    removal_reasons.made_ready(store.gone).close()
    yield f"run/gone: {store.gone.stat().st_size} bytes"
    LeaseTaker.of_node(store.run).close()
    yield f"run/marks: {(store.run / 'marks').stat().st_size} bytes"
    table = ReadLeaseTable(store.run / "leases")
    yield f"run/leases: {next((store.run / 'leases').iterdir()).stat().st_size} bytes"
    table.close()
    files = DataFiles(store.data)
    yield f"data file: {Path(files.path(INO, 2)).relative_to(store.root)}"
    files.begin_arriving(INO, 2, 1)
    arriving = next(store.data.glob("arriving/*"))
    yield f"data file that arrives: {arriving.relative_to(store.root)}"
    files.close()
    yield f"in quarantine: {_quarantined(store)}"


def _quarantined(store: layout.Store) -> str:
    source = store.data / "x"
    source.touch()
    path = quarantine_directory.enter(str(store.data), str(source), INO, 2, Reason.DAMAGED)
    assert path is not None
    (entry,) = quarantine_directory.entries(str(store.data))
    return str(Path(path).relative_to(store.root)).replace(str(entry.since_ns), str(TIME))


def _journal(here: Path) -> Iterator[str]:
    """Files of the engine in which a power cut must find what it needs."""
    before = Position(1, 0, 5, b"digest55")
    journal.prepare_journal(here, 2)
    start = journal.start_journal(here, before)
    writer = journal.JournalWriter(here)
    end = writer.append(start, b"", [b"key", b"value", b"gone", None])
    writer.close()
    path = journal.journal_path(here, 2)
    with path.open("r+b") as file:
        journal.mark_synced(file.fileno(), end.sequence)
        assert journal.read_mark(file.fileno()) == end.sequence
    assert [after for _, after in journal.read_records(path, start)] == [end]
    raw = path.read_bytes()
    yield from shown(
        "journal.2: its head", raw[: start.end], f"after {tuple(before)}", "mark: commit 6"
    )
    yield from shown("journal.2: a commit", raw[start.end :], "key: value; gone: deleted")
    yield from shown("position", journal.pack_position(end), str(tuple(end)))
    yield from shown("number of the last commit", journal.pack_generation(end), str(end.sequence))
    state = StateFile(here)
    state.write(TrustState(12345, clean=True))
    assert state.read() == TrustState(12345, clean=True)
    state.close()
    yield from shown("state", (here / "state").read_bytes(), "boot 12345, closed cleanly")
    base = here / "base.2"
    base.write_bytes(b"p" * 4096)
    with base.open("r+b") as file:
        checkpoint_seal.seal(file.fileno())
    yield from shown("base.2: its seal", base.read_bytes()[4096:], "of a page of 4096 bytes `p`")
