"""Metadata of the version before become those of this one: a lone node's at its first start, a
cluster's when somebody asks for it and no node of the version before is left; a kill at any step
leaves what the next attempt finishes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest
import trio

from kvfs.base.errors import Busy, NotSupported
from kvfs.base.version import PROTOCOL
from kvfs.cluster import membership, node_identity, schema_upgrade, secrets
from kvfs.cluster.membership import Measured, Membership, joined
from kvfs.cluster.node_records import NodeRecord, put_node, set_state
from kvfs.datastore import layout
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Tag, pack
from kvfs.tree import namespaces
from kvfs.tree.metadata_copy import copy_namespace
from tests.contract.direct import Direct
from tests.contract.memory_engine import MemoryEngine
from tests.contract.redis_servers import RedisServer, killed
from tests.integration.harness import ROOT

_OPEN: Final = """\
import sys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
engine = EmbeddedEngine(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
engine.close()
"""
_KILLED: Final = """\
import os, signal, sys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
engine = EmbeddedEngine(sys.argv[1])
now = engine.transact_now
def killed(fn):
    if sys.argv[2] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    now(fn)
    os.kill(os.getpid(), signal.SIGKILL)
engine.transact_now = killed
engine.upgrade_now()
"""


def version_in(t: Transaction) -> bytes | None:
    return t.get(keys.VERSION)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An engine's directory, as the version before left it."""
    engine = EmbeddedEngine(tmp_path / "meta")
    engine.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
    engine.transact_now(lambda t: t.put(keys.VERSION, b"1"))
    engine.close()
    return tmp_path / "meta"


@contextmanager
def opened_elsewhere(path: Path) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", _OPEN, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"open\n"
        yield
        other.stdin.close()
        assert other.wait() == 0


def test_a_program_that_may_write_in_the_form_before_is_waited_for(path: Path) -> None:
    engine = EmbeddedEngine(path)
    with opened_elsewhere(path):
        assert not engine.upgrade_now()
        assert engine.read_now(version_in) == b"1"
    assert engine.upgrade_now()
    assert engine.read_now(version_in) == b"2"
    with opened_elsewhere(path):  # nobody is shut out by it
        assert engine.upgrade_now(), "there is nothing to do"
    engine.close()


@pytest.mark.parametrize(("when", "left"), [("before", b"1"), ("after", b"2")])
def test_an_upgrade_that_was_killed_is_done_again(path: Path, when: str, left: bytes) -> None:
    command = [sys.executable, "-c", _KILLED, str(path), when]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    engine = EmbeddedEngine(path)
    assert engine.read_now(version_in) == left
    assert engine.upgrade_now()
    assert engine.read_now(version_in) == b"2"
    engine.close()


# ---- a cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def engine(server: RedisServer, tmp_path: Path) -> Iterator[Direct]:
    """Of a cluster that the version before made."""
    found = Direct(f"{server.url}?prefix={tmp_path.name}")
    found.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
    found.transact_now(lambda t: t.put(keys.VERSION, b"1"))
    yield found
    found.close()


def record(number: int, protocol: int) -> NodeRecord:
    return NodeRecord(
        number=number, name=f"n{number}", store=f"s{number}", incarnation=1, protocol=protocol
    )


def nothing() -> Measured:
    return Measured(0, 0)


async def nobody(_protocol: int) -> str:
    return ""


class Layout:
    """A server's, which can be raised once."""

    def __init__(self) -> None:
        self.is_raised = False

    async def __call__(self) -> bool:
        was, self.is_raised = self.is_raised, True
        return not was


def test_it_is_refused_while_a_node_of_the_version_before_is_a_member(engine: Direct) -> None:
    """Also one that is away: it comes back as what it was."""
    engine.transact_now(lambda t: put_node(t, record(1, PROTOCOL)))
    engine.transact_now(lambda t: put_node(t, record(2, 1)))
    with pytest.raises(Busy, match=r"node 2 \(n2\)\. Start each"):
        trio.run(schema_upgrade.finish, engine, nobody, Layout())
    assert engine.read_now(version_in) == b"1"
    engine.transact_now(lambda t: set_state(t, 2, lambda _old: True, "removed"))
    order = Layout()
    assert trio.run(schema_upgrade.finish, engine, nobody, order)
    assert engine.read_now(version_in) == b"2"
    assert order.is_raised
    assert not trio.run(schema_upgrade.finish, engine, nobody, order), "there is nothing to do"


def test_it_is_taken_back_where_a_node_of_the_version_before_has_just_joined(
    server: RedisServer, engine: Direct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a lease, and its record comes later."""
    url = f"{server.url}?prefix={tmp_path.name}"

    def store(name: str) -> layout.Store:
        made = layout.create_store(tmp_path / name)
        if name != "a":
            text = (tmp_path / "a" / node_identity.SECRETS).read_text()
            node_identity.keep_secrets(
                made.root / node_identity.SECRETS, secrets.parse(text, "a test")
            )
        return made

    async def main() -> None:
        async with member("a") as present:
            await present.announce(engine, nothing)
            monkeypatch.setattr(membership, "PROTOCOL", 1)
            async with member("b"):
                monkeypatch.undo()
                with pytest.raises(Busy, match=r"node 2 \(b\)"):
                    await schema_upgrade.finish(engine, present.earlier, Layout())
                assert await engine.read(version_in) == b"1"
            assert await schema_upgrade.finish(engine, present.earlier, Layout())
        assert await engine.read(version_in) == b"2"

    def member(name: str) -> AbstractAsyncContextManager[Membership]:
        return joined(store(name), url, membership.About(name=name))

    trio.run(main)


def test_a_node_of_the_version_before_that_is_entered_meanwhile_is_seen(engine: Direct) -> None:
    async def enters(_protocol: int) -> str:
        await engine.transact(lambda t: put_node(t, record(1, 1)))
        return ""

    with pytest.raises(Busy, match=r"node 1 \(n1\)"):
        trio.run(schema_upgrade.finish, engine, enters, Layout())
    assert engine.read_now(version_in) == b"1>2", "no other one joins"


def test_what_was_cut_short_is_finished_by_the_next_request(engine: Direct) -> None:
    async def killed_here(_protocol: int) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trio.run(schema_upgrade.finish, engine, killed_here, Layout())
    assert engine.read_now(version_in) == b"1>2"
    engine.read_now(namespaces.check_format)  # nodes of this version go on
    order = Layout()

    async def killed_later() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trio.run(schema_upgrade.finish, engine, nobody, killed_later)
    assert engine.read_now(version_in) == b"2"
    assert trio.run(schema_upgrade.finish, engine, nobody, order)
    assert order.is_raised
    assert engine.read_now(version_in) == b"2"


def test_a_node_s_start_keeps_the_tags_of_its_record(
    server: RedisServer, engine: Direct, tmp_path: Path
) -> None:
    url = f"{server.url}?prefix={tmp_path.name}"
    store, about = layout.create_store(tmp_path / "a"), membership.About(name="a")

    async def start() -> None:
        async with joined(store, url, about) as member:
            await member.announce(engine, nothing)

    def give(t: Transaction) -> None:
        ((key, value),) = t.scan(keys.NODES, keys.after(keys.NODES))
        found = msgspec.msgpack.decode(value, type=NodeRecord)
        t.put(key, pack(msgspec.structs.replace(found, tags={Tag.EXPIRY: b"t"})))

    trio.run(start)
    engine.transact_now(give)
    trio.run(start)
    ((_, value),) = engine.read_now(lambda t: list(t.scan(keys.NODES, keys.after(keys.NODES))))
    assert msgspec.msgpack.decode(value, type=NodeRecord).tags == {Tag.EXPIRY: b"t"}


# ---- copies


def test_no_namespace_is_copied_to_metadata_of_the_version_before() -> None:
    """Its records may have tags, which that version's nodes would drop."""
    source, target = MemoryEngine(), MemoryEngine()
    for each in (source, target):
        each.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
    source.transact_now(lambda t: namespaces.create(t, b"a", uid=0, gid=0, now=2))
    target.transact_now(lambda t: t.put(keys.VERSION, b"1"))

    def copy() -> None:
        copy_namespace(source, target, b"a", replace=False, now=3, progress=lambda _: None)

    with pytest.raises(NotSupported, match="finish-upgrade"):
        copy()
    target.transact_now(lambda t: t.put(keys.VERSION, b"2"))
    copy()
    assert target.read_now(lambda t: namespaces.by_name(t, b"a"))
