"""This node's part in its cluster: it joins, renews its lease, and leaves.

| step of the start | state after a kill |
|---|---|
| 1 secrets found, or made if the cluster has none | a file that the next start uses |
| 2 joined: number, incarnation, lease | a lease that ends by itself |
| 3 kept in the store | nothing to repair |
| 4 announced: its record | the same |

Invariants
- Only one process at a time is a node: the store's lock ensures that for one directory, the
  incarnation elsewhere. The engine refuses writes of an older one.
- `holds_lease` is true only while no other node may think that this one is dead.
"""

import logging
import secrets as randomness
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import trio

from kvfs.base.clock import now
from kvfs.base.errors import UNDECODABLE, AccessDenied, Busy, Conflict, KvfsError, NotFound
from kvfs.base.version import PROTOCOL, VERSION
from kvfs.cluster import handshake, node_identity, secrets, version_range
from kvfs.cluster.failure_detector import RENEWAL_S, TERM_S, Tenure
from kvfs.cluster.node_identity import Kept
from kvfs.cluster.node_records import (
    NodeRecord,
    NodeState,
    Reports,
    Words,
    check_name,
    list_nodes,
    number_in,
    put_node,
    unpack_node,
    unpack_words,
)
from kvfs.cluster.roster import Roster
from kvfs.cluster.secrets import Secret, Secrets
from kvfs.datastore.layout import Store
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.lmdb.boot import boot_id
from kvfs.meta.node_leases import Fenced, HeardLeases, Joined, JoinState, Leases, Lost, Renewed
from kvfs.meta.records import pack
from kvfs.meta.redis.calling import locate
from kvfs.meta.redis.leasing import LeaseTable
from kvfs.meta.server_clock import ServerClock

DEADLINE_S: Final = 5.0
_FAREWELL_S: Final = 1.0
log = logging.getLogger(__name__)


_REBUILT: Final = (
    "`kvfs rebuild --engine` on its nodes puts a cluster back; `kvfs up --found` begins a new one"
)


class About(msgspec.Struct, frozen=True, kw_only=True):
    """A node's description, from its settings."""

    name: str
    peer: str = ""
    """HOST:PORT where others reach it; empty: nowhere."""
    zone: str = ""
    rack: str = ""
    capacity_bytes: int = 0
    media: tuple[str, ...] = ("ssd",)
    tls: bool = False
    """Whether it speaks TLS with other nodes."""


class Measured(msgspec.Struct, frozen=True):
    """The measurements that a node reports with each renewal."""

    free_bytes: int
    capacity_bytes: int
    load: float = 0.0
    lacking: int = 0
    """Files that lack copies which this node must have made."""
    obstacle: str = ""
    """The reason why this node cannot be drained, for people."""


class Membership:
    """A node that joined. Made by `joined`."""

    def __init__(
        self,
        table: LeaseTable,
        store: Store,
        about: About,
        secret_file: Path,
        boot: int,
        *,
        founds: bool,
        goes_on: bool,
    ) -> None:
        """`founds`, `goes_on`: as in `joined`."""
        self._founds = founds
        self._goes_on = goes_on
        self.store = store
        self.about = about
        self.secret_file = secret_file
        self.secrets: Secrets
        """The secrets that are valid now; others replace them while the node runs."""
        self.node = 0
        self.incarnation = 0
        self.since = 0
        """The first of the incarnations that this one goes on with: itself, where that is none."""
        self.is_unbroken = False
        """Whether this one goes on with another, whose lease had not ended: others have not gone
        past anything."""
        self.is_handed_over = goes_on
        """Whether the next incarnation goes on with this one, and takes its lease over."""
        self.returns = goes_on
        """Whether another daemon follows this one when it dies, as it has told, or tells next."""
        self.cluster = ""
        self.roster = Roster(0)
        self.clock: Final = ServerClock()
        self._measure: Callable[[], Measured] = lambda: Measured(0, about.capacity_bytes)
        self._table = table
        self._boot = boot
        self._place = store.place()
        self._token = randomness.token_hex(8)
        self._tenure = Tenure(now())
        self._reports = Reports(randomness.randbelow(1000) / 1000)
        self._heard = HeardLeases()

    @property
    def holds_lease(self) -> bool:
        """Whether it may do what only a living node may: serve its peers, and believe what it last
        heard."""
        return self._tenure.holds(now())

    def lapses(self) -> int:
        """Returns how often its lease has ended so far: others may have gone past work begun before
        the last time."""
        return self._tenure.lapses(now())

    @property
    def number(self) -> bytes:
        """Its number as keys and values hold it."""
        return keys.pack_node(self.node)

    @property
    def party(self) -> handshake.Party:
        """The identity that the node declares to a peer."""
        return handshake.Party(self.cluster, self.node, self.incarnation, self.about.name)

    # ---- joining and leaving

    async def join(self) -> None:
        """Joins the cluster. Raises Unavailable, Lost, Fenced (removed), Conflict (another
        cluster's, or its store runs elsewhere), AccessDenied (another secret), NotSupported
        (versions), Invalid, OSError. Cancelled: it may have joined; its lease ends by itself."""
        before = node_identity.which_node(self.store)
        looked_s, state = now(), await self._table.peek()
        if before is not None:
            self._check_cluster(before, state)
            await self._wait_for_twin(before, state)
            self._go_on(before, state)
        _check_versions(state.leases)
        made = await self._find_secrets(state)
        known = None if before is None else before.incarnation
        try:
            asked_s, me = now(), await self._join(known)
        except AccessDenied:
            if made:
                self.secret_file.unlink(missing_ok=True)
            raise
        self.node, self.incarnation = me
        self.since = self.since or me.incarnation
        if now() - looked_s >= RENEWAL_S:
            self.is_unbroken = False  # the lease may have ended since that look
        node_identity.keep_node(self.store, Kept(self.cluster, me.node, me.incarnation))
        self.roster = Roster(me.node)
        self._tenure.renewed(asked_s, now())
        await self.renew()
        log.info("node %d of the cluster %s, incarnation %d", me.node, self.cluster, me.incarnation)

    async def announce(self, engine: Engine, measure: Callable[[], Measured]) -> None:
        """Enters this node's record: from now on others place data here, by what each renewal
        measures. Raises Fenced, Conflict (another node has the name), and what `Engine.transact`
        raises."""

        def enter(t: Transaction) -> None:
            old = t.get(keys.node(self.node))
            known = None if old is None else unpack_node(old)
            state: NodeState = "active" if known is None else known.state
            if state == "removed":
                raise Fenced("this node was removed from its cluster")
            if known is None or known.name != self.about.name:
                check_name(t, self.node, self.about.name)
            tags = None if known is None else known.tags
            put_node(t, msgspec.structs.replace(self._record(state=state), tags=tags))

        await engine.transact(enter)
        self._measure = measure
        self._reports.forget()
        await self.renew()  # with what it measures by now
        self.roster.read(await engine.read(list_nodes))

    async def renew(self) -> None:
        """Renews the lease, and hears of the others' and the secrets. Raises Fenced (this process
        must end), Unavailable, AccessDenied, Invalid, OSError."""
        asked_s = now()
        try:
            renewed = await self._table.renew(
                Joined(self.node, self.incarnation), self._words(), self._heard
            )
        except (Fenced, Lost):
            self._tenure.end()
            raise
        self._tenure.renewed(asked_s, now())
        self.clock.heard(renewed.time_ns)
        self.roster.hear(renewed.news, now())
        self._look_after_secrets(renewed)

    async def leave(self) -> None:
        """Gives the lease up, so that others need not wait for its end, unless the next incarnation
        takes it over. Never raises unless cancelled."""
        self._tenure.end()
        if self.is_handed_over:
            return
        with trio.move_on_after(_FAREWELL_S, shield=True):
            try:
                await self._table.leave(Joined(self.node, self.incarnation))
            except KvfsError as error:
                log.info("the cluster was not told that this node stops: %s", error)

    # ---- what people ask for

    async def fence(self, node: int, store: str) -> None:
        """Keeps any process of this node from writing, and its store from joining; idempotent.
        Raises Unavailable."""
        await self._table.remove(node, store)

    async def earlier(self, protocol: int) -> str:
        """Returns the living nodes that speak an earlier protocol, for people, including those that
        have no record yet; empty: there are none. Raises Unavailable."""
        return ", ".join(
            f"{number} ({words.name})"
            for number, lease in sorted((await self._table.peek()).leases.items())
            if lease.age_s < TERM_S
            and (words := _readable(lease.words)) is not None
            and words.protocol < protocol
        )

    async def rotate_secret(self) -> Secret:
        """Makes a new secret beside those that are valid; the other nodes have to be given it.
        Raises Conflict, Unavailable, OSError."""
        before, after = self.secrets, self.secrets.with_new()
        # In the file first: a secret that the engine knows and nobody has would shut all out.
        node_identity.keep_secrets(self.secret_file, after)
        await self._table.replace_secrets(before.digests, after.digests)
        self.secrets = after
        return after[0]

    async def retire_secrets(self) -> None:
        """Invalidates all secrets but the newest. Raises Conflict, Unavailable, OSError."""
        after = Secrets(self.secrets[:1])
        await self._table.replace_secrets(self.secrets.digests, after.digests)
        node_identity.keep_secrets(self.secret_file, after)
        self.secrets = after

    # ---- its steps

    def _check_cluster(self, before: Kept, state: JoinState) -> None:
        if not state.cluster:
            raise Lost(
                f"the engine holds no cluster, and {self.store.root} is node {before.node} of"
                f" {before.cluster}: the engine's data are gone, or the URL names another. See"
                " `kvfs rebuild --help`"
            )
        if state.cluster != before.cluster:
            raise Conflict(
                f"the store {self.store.root} is of the cluster {before.cluster}, the engine of"
                f" {state.cluster}: name the right engine, or another prefix (?prefix=NAME). Where"
                " that one was made after the engine was emptied, `kvfs rebuild --engine URL"
                " --replace` puts this one back in its place"
            )

    async def _wait_for_twin(self, before: Kept, state: JoinState) -> None:
        """Waits until no other process can be this node. For this very store, our lock shows that
        none is: the process that renewed its lease was killed. A lease that was renewed elsewhere a
        moment ago belongs to a host which has just died, or to a copy of the store, whose lease
        goes on."""
        found, until_s = state.leases.get(before.node), now() + TERM_S
        # Of the two clocks the engine's may have been set back.
        while found is not None and found.age_s < TERM_S and now() < until_s:
            words = _readable(found.words)
            if words is None or words.is_of(self._boot, self._place):
                return
            log.info("node %d was elsewhere a moment ago: its lease has to end", before.node)
            await trio.sleep(RENEWAL_S)
            again = (await self._table.peek()).leases.get(before.node)
            if again is not None and again.beat != found.beat:
                raise Conflict(
                    f"node {before.node} runs elsewhere ({words.name}): is {self.store.root}"
                    " a copy of its store? `kvfs node join --again` makes it a node of its own"
                )
            found = again

    def _go_on(self, before: Kept, state: JoinState) -> None:
        """Goes on with the incarnation before, if that is asked for and its lease is there."""
        lease = state.leases.get(before.node) if self._goes_on else None
        words = None if lease is None else _readable(lease.words)
        if lease is not None and words is not None and lease.incarnation == before.incarnation:
            self.since = words.since or before.incarnation
            self.is_unbroken = lease.age_s < TERM_S - RENEWAL_S

    async def _find_secrets(self, state: JoinState) -> bool:
        """Returns whether they were made now."""
        found = node_identity.read_secrets(self.secret_file)
        if not state.cluster and not self._founds:
            await self._refuse_to_found(found)
        self.cluster = await self._table.found(None if found is None else found.cluster)
        made = False
        if found is None:
            if state.secrets:
                raise AccessDenied(
                    f"the cluster {self.cluster} has a secret, and {self.secret_file} is not there:"
                    " print it with `kvfs node secret` on one of its nodes, and give it to"
                    " `kvfs node join` here"
                )
            found, made = node_identity.make_secret(
                self.secret_file, secrets.generate(self.cluster)
            )
        if found.cluster != self.cluster:
            raise Conflict(
                f"{self.secret_file} is of the cluster {found.cluster}, the engine of"
                f" {self.cluster}"
            )
        self.secrets = found
        return made

    async def _refuse_to_found(self, found: Secrets | None) -> None:
        """Refuses an engine that was emptied, which is not a new one: its cluster's nodes may be
        away. Raises Conflict."""
        if found is not None and not (await self._table.peek()).cluster:
            raise Conflict(
                f"the engine holds no cluster, and {self.secret_file} is of {found.cluster}: the"
                f" engine's data are gone, or the URL names another. {_REBUILT}"
            )
        if found is None and await self._table.was_emptied():
            raise Conflict(
                "the engine holds no cluster and was emptied since it was started: one may have"
                f" been there. {_REBUILT}"
            )

    async def _join(self, known: int | None) -> Joined:
        return await self._table.join(
            *(self.store.identity.node, self._token, self._words(), self.secrets.digests),
            known,
            wanted=number_in(self.about.name) or 0,
        )

    def _look_after_secrets(self, renewed: Renewed) -> None:
        """Takes the secrets that `kvfs node join` wrote meanwhile, and forgets those that are no
        longer valid."""
        found = node_identity.read_secrets(self.secret_file) or self.secrets
        valid = Secrets(each for each in found if each.digest in renewed.secrets)
        if not valid:
            raise AccessDenied(
                f"the cluster's secret was replaced, and {self.secret_file} holds only older ones:"
                " others refuse this node until `kvfs node join` gives it the new one"
            )
        if valid != found:
            node_identity.keep_secrets(self.secret_file, valid)
        self.secrets = valid

    def _words(self) -> bytes:
        measured = self._measure()
        words = Words(
            name=self.about.name,
            protocol=PROTOCOL,
            version=VERSION,
            boot=self._boot,
            free_bytes=measured.free_bytes,
            capacity_bytes=measured.capacity_bytes,
            load=measured.load,
            lacking=measured.lacking,
            obstacle=measured.obstacle,
            place=self._place,
            tls=self.about.tls,
            since=self.since if self.since != self.incarnation else 0,
            returns=self.returns,
        )
        return pack(self._reports.tell(words, len(self.roster), now()))

    def _record(self, state: NodeState) -> NodeRecord:
        about = self.about
        return NodeRecord(
            number=self.node,
            name=about.name,
            store=self.store.identity.node,
            incarnation=self.incarnation,
            peer=about.peer,
            zone=about.zone,
            rack=about.rack,
            capacity_bytes=about.capacity_bytes,
            media=about.media,
            version=VERSION,
            protocol=PROTOCOL,
            state=state,
        )


@asynccontextmanager
async def joined(
    store: Store,
    url: str,
    about: About,
    *,
    secret_file: Path | None = None,
    boot: int | None = None,
    founds: bool = True,
    goes_on: bool = False,
) -> AsyncIterator[Membership]:
    """Makes this store's node a member as long as the block lasts; it leaves in order at its end.
    The caller holds the store's lock. Without `founds` no cluster is made if the engine seems to
    have lost one (Conflict). `goes_on`: with what the incarnation before had
    open and leased. Raises what `Membership.join` raises; exceptions of the block pass."""
    table = LeaseTable(locate(url), DEADLINE_S)
    try:
        file = secret_file or store.root / node_identity.SECRETS
        member = Membership(
            *(table, store, about, file, boot_id() if boot is None else boot),
            founds=founds,
            goes_on=goes_on,
        )
        await member.join()
        try:
            yield member
        finally:
            await member.leave()
    finally:
        table.close()


async def check_secrets(url: str, those: Secrets) -> None:
    """Checks that a node with these secrets would be admitted. Raises NotFound (no cluster is
    there), Conflict (another one), AccessDenied, Unavailable, Invalid, NotSupported."""
    location = locate(url)
    table = LeaseTable(location, DEADLINE_S)
    try:
        state = await table.peek()
    finally:
        table.close()
    if not state.secrets:
        raise NotFound(f"there is no cluster at {location.shown} yet: `kvfs up` makes one")
    if state.cluster != those.cluster:
        raise Conflict(
            f"the secret is of the cluster {those.cluster}, at {location.shown} is {state.cluster}"
        )
    if those.common(state.secrets) is None:
        raise AccessDenied(
            f"the secret is not valid at {location.shown} any more: `kvfs node secret` on a node"
            " that runs prints the one that is"
        )


async def check_unused(url: str) -> None:
    """Raises Busy if a node lives whose metadata are at `url`; Unavailable, Invalid."""
    location = locate(url)
    table = LeaseTable(location, DEADLINE_S)
    try:
        leases = (await table.peek()).leases
    finally:
        table.close()
    living = sorted(number for number, lease in leases.items() if lease.age_s < TERM_S)
    if living:
        raise Busy(
            f"node {living[0]} uses the metadata at {location.shown}: stop all nodes first"
            f" (a killed one counts for {TERM_S:.0f} s)"
        )


def _check_versions(leases: Leases) -> None:
    """Raises NotSupported if a node lives that this one cannot work with."""
    for number, lease in sorted(leases.items()):
        words = _readable(lease.words)
        if words is not None and lease.age_s < TERM_S:
            version_range.check(words.protocol, words.version, who=f"node {number} ({words.name})")


def _readable(words: bytes) -> Words | None:
    try:
        return unpack_words(words)
    except UNDECODABLE:
        return None
