"""A store opened beside its node, or without one: the engine lets several processes in."""

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cli import node_requests
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, NotFound, Unavailable
from kvfs.meta.records import ROOT_INODE

if TYPE_CHECKING:
    from kvfs.client import Client
    from kvfs.datastore.layout import Store
    from kvfs.meta.blocking_engine import BlockingEngine
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
    from kvfs.session.session import Session

_SEPARATOR: Final = b"/"


class _Engine:
    """The metadata of a store; changes beside a node of a cluster go through the node."""

    def __init__(self, session: "Session") -> None:
        self.read_now = session.read_as_it_is
        self.transact_now = session.write
        self.sync_now = session.sync


@contextlib.contextmanager
def engine_of(config: Config) -> Iterator["BlockingEngine"]:
    """Opens the metadata engine of an existing store. Raises NotFound, Invalid (another program's
    directory), Corrupt."""
    from kvfs.session import session

    opened = session.acquire(config.store)
    try:
        yield _Engine(opened)
    finally:
        session.release(opened)


@contextlib.contextmanager
def stopped_store(path: Path, *, make: bool = False) -> Iterator[tuple["Store", "EmbeddedEngine"]]:
    """Opens a store that no node uses meanwhile, and the engine in it. `make`: makes a new store if
    there is none, and the earlier agreement of its data files and records no longer counts. Raises
    NotFound, Busy."""
    from kvfs.datastore import layout
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

    try:
        store = layout.open_store(path)
    except NotFound:
        if not make:
            raise
        store = layout.create_store(path)
    store.lock()
    try:
        if make:
            store.take_clean()
        with contextlib.closing(EmbeddedEngine(store.meta)) as engine:
            yield store, engine
    finally:
        store.unlock()


@contextlib.contextmanager
def client_of(config: Config) -> Iterator["Client"]:
    """Opens the Python API on a store, with or without a running node."""
    from kvfs.client import Client

    with Client(store=config.store) as client:
        yield client


def tell_node(config: Config, name: bytes, ino: int) -> None:
    """Makes a running node's mount forget what its kernel knows of a top-level name; without a node
    there is nothing to do."""
    change = {
        "parent": ROOT_INODE,
        "name": base64.b64encode(name).decode("ascii"),
        "ino": ino,
    }
    with contextlib.suppress(Unavailable):
        node_requests.ask(config, "changed", {"changes": [change]})


def namespace_name(text: bytes) -> bytes:
    """Returns the name of a namespace, written with or without slashes around it. Raises
    Invalid."""
    name = text.strip(_SEPARATOR)
    if not name or _SEPARATOR in name:
        raise Invalid(f"'{text.decode(errors='backslashreplace')}' is not the name of a namespace")
    return name
