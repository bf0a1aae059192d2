"""The NFS door beside a node: a companion of its mount (`gateway.service.Companion`).

It serves while the node has a mount that can have views: one view for each exported namespace, all
exported by one NFS-Ganesha in a jail. Once a second it examines the exports.

| event | action |
|---|---|
| an export comes, changes or goes | view, configuration, Ganesha reads it again; clients stay |
| Ganesha ends | started again, after 0.1 s and then twice as long each time, 5 s at most |
| Ganesha does not answer for a minute | killed, and so started again |
| the mount goes | Ganesha ends, the views with the mount; all begin again with the next one |
| the daemon ends, in order or not | Ganesha with it, unless the mount goes on with another daemon |
| the next daemon begins | it goes on with Ganesha, which reads its exports again |
"""

import contextlib
import logging
import time
import uuid
import zlib
from collections.abc import Mapping
from typing import Any, Final

import trio

from gateway.fuse.views.kept_views import views_of
from gateway.fuse.views.view import MountViews, innermost
from gateway.nfs import connections, exports, liveness, port_mapper, requirements
from gateway.nfs import jail as jails
from gateway.nfs.client_records import ClientRecords
from gateway.nfs.exports import Exported
from gateway.nfs.ganesha import Ganesha
from gateway.nfs.ganesha_config import GRACE_S, Server, first_lines, render
from gateway.nfs.jail import Jail
from gateway.nfs.jail_control import JailControl, TakenJail, wish
from gateway.nfs.listening import bound
from gateway.nfs.place import NfsDirectories
from gateway.nfs.read_only_views import ReadOnlyViews
from kvfs.base.config import NFS_USUAL, Address, Config
from kvfs.base.errors import KvfsError, NotSupported, Unavailable
from kvfs.cluster.node_identity import which_node
from kvfs.node import Node

_LOOK_S: Final = 1.0
BACKOFF_S: Final = (0.1, 5.0)
_HEALTHY_S: Final = 30.0
_ANSWER_S: Final = 20.0
_PAUSE_S: Final = 0.05
_ASK_S: Final = 5.0
_PATIENCE_S: Final = 60.0
_NO_MOUNT: Final = "the node has no mount in passthrough or relay mode"
"""Patience with an answer that Ganesha's own threads give; they may all wait for slow disks for a
while."""
_KVFS: Final = uuid.UUID("6f0f7a3e-6a0c-5d3c-9a52-5d1c5b8f7f11")
log = logging.getLogger(__name__)


def is_wanted(config: Config) -> bool:
    """Returns whether the settings ask for NFS."""
    return config.nfs != "off"


class NfsServing:
    """The NFS door of one node. A companion: call it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        wanted = NFS_USUAL if config.nfs == "auto" else config.nfs
        assert isinstance(wanted, Address)
        self._address = wanted
        self._served: dict[int, Exported] = {}
        self._problems: dict[int, str] = {}
        """Problems of exports that cannot be served, by number."""
        self._read_only = ReadOnlyViews()
        self._lines: dict[int, int] = {}
        """The exports in the configuration, by their first lines."""
        self._ganesha: Ganesha | None = None
        self._look = trio.Event()
        self._looked = trio.Event()
        self._restarts = 0
        self._began = False
        """Whether there has been a mount that could have views."""
        self._told: Ganesha | None = None
        """The Ganesha that has read the exports of `_served`."""
        self._own_ports: set[int] = set()
        """The ports of connections that ask whether Ganesha answers."""
        self._jail = JailControl(config.store / "run")
        self._looks = 0
        """How often an examination of the exports was begun."""
        self._problem = "it has not started yet"

    async def __call__(self, node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        """Raises NotSupported (something is missing), Busy (the port is taken), Invalid, OSError,
        Unavailable (Ganesha does not start)."""
        self._node = node
        self._program = requirements.require()
        self._identity = _identity(node)
        self._place = NfsDirectories(node.store.run, node.store.root / "nfs")
        self._clients_state = ClientRecords(node, node.store.root / "nfs")
        node.reports["nfs"] = self._report
        answers = {"nfs_look": self._answer_look, "nfs_clients": self._answer_clients}
        node.control.handlers.update(answers, nfs_adopt=self._answer_adopt)
        views = await self._views()
        taken = await self._taken(views)
        if taken is None:
            await self._require_free()
        started = False
        while True:
            try:
                if taken is None:
                    await trio.to_thread.run_sync(self._place.make)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._until_without, views, nursery.cancel_scope)
                    if self._config.nfs_v3:
                        await nursery.start(port_mapper.serve, self._place.root / "run")
                    await nursery.start(self._run_ganesha, views, taken)
                    if not started:
                        task_status.started()
                        started = True
                    await self._keep(views)
            except* (KvfsError, OSError) as group:
                if not started:
                    raise innermost(group) from None
                self._problem = str(innermost(group))
                log.error("NFS: %s", self._problem)
                await trio.sleep(BACKOFF_S[1])
            finally:
                with trio.CancelScope(shield=True):
                    await self._close(views)
            views, taken = await self._views(), None

    async def _require_free(self) -> None:
        """Raises Busy where another server has the ports, or one of a killed node is still there;
        Invalid."""
        with contextlib.suppress(OSError):  # there is none that waits for another daemon
            await trio.to_thread.run_sync(self._jail.kill)
        await trio.to_thread.run_sync(self._place.wait_until_left)
        self._address = await trio.to_thread.run_sync(bound, self._address)
        if self._config.nfs_v3:
            mount_port = Address(self._address.host, self._config.nfs_mount_port)
            await trio.to_thread.run_sync(bound, mount_port)

    async def _taken(self, views: MountViews) -> TakenJail | None:
        """Returns the Ganesha of an earlier daemon, whose views all go on; another one is ended."""
        if views.gone_on is None:
            return None
        control = views.gone_on.keeper
        assert isinstance(control, JailControl), "it keeps views"
        assert control.taken is not None, "its views go on"
        taken = control.taken
        about = taken.about
        if set(views) == set(views_of(taken.items)):
            self._address = Address(*about["address"])
            self._place.go_on(tuple(about["secrets"]), views.directories())
            return taken
        log.warning("NFS-Ganesha is started anew: a view that it served does not go on")
        await Jail.taken(self._jail, taken).close(ends=True)
        views.kept.end()
        for number in views:
            await views.remove(number)
        return None

    # ---- the mount

    async def _views(self) -> MountViews:
        """Returns the views of the mount, once there is one that can have some. Raises NotSupported
        if the first cannot."""
        mounts = self._node.mounts
        while (views := mounts.views) is None:
            self._problem = _NO_MOUNT
            description = mounts.description
            if description is not None and description["mode"] == "libfuse" and not self._began:
                raise NotSupported(f"no NFS: {self._problem} (its mode is libfuse)")
            await mounts.view_changes.wait()
        self._began = True
        assert isinstance(views, MountViews), "the mount is of this package"
        return views

    async def _until_without(self, views: MountViews, scope: trio.CancelScope) -> None:
        mounts = self._node.mounts
        while mounts.views is views:
            await mounts.view_changes.wait()
        scope.cancel()

    # ---- Ganesha

    async def _run_ganesha(
        self, views: MountViews, taken: TakenJail | None, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Keeps one running, over the present views. Raises Unavailable, OSError if the first does
        not start."""
        status: trio.TaskStatus[None] = task_status
        is_first, pause_s = True, BACKOFF_S[0]
        while True:
            began, complaint = time.monotonic(), ""
            try:
                ganesha, jail = await self._begin(views, taken)
                async with trio.open_nursery() as nursery:
                    await nursery.start(self._run_one, ganesha, jail)
                    self._ganesha, self._problem = ganesha, ""
                    status.started()
                    status = trio.TASK_STATUS_IGNORED
                complaint = ganesha.complaint
            except* (KvfsError, OSError) as group:
                if is_first:
                    raise
                self._problem = str(innermost(group))
            finally:
                self._ganesha = None
                views.kept.end()
            is_first, taken = False, None
            self._problem = self._problem or f"NFS-Ganesha ended: {complaint or 'silently'}"
            log.error("%s; it is started again", self._problem)
            if time.monotonic() - began > _HEALTHY_S:
                pause_s = BACKOFF_S[0]
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_S[1])
            self._restarts += 1

    async def _begin(self, views: MountViews, taken: TakenJail | None) -> tuple[Ganesha, Jail]:
        """Starts one, or goes on with that of an earlier daemon. Raises OSError, Unavailable."""
        if taken is not None:
            log.info("NFS-Ganesha goes on: its daemon before is no more")
            (log_fd,) = taken.items[jails.LOG].fds
            return Ganesha(log_fd, taken.about["pid"]), Jail.taken(self._jail, taken)
        await self._apply(views, await self._wanted())
        place, address = self._place, self._address
        about = {
            "wish": wish(self._config),
            "address": [address.host, address.port],
            "secrets": place.secrets,
        }
        guard = "guarded" if self._config.nfs_v3 else ""
        jail, log_fd = await jails.start(
            self._jail,
            (str(place.root), *place.secrets, guard, self._program),
            wait_s=views.outlives_s,
            about=about,
            items=views.kept.begin(self._jail),
        )
        return Ganesha(log_fd), jail

    async def _run_one(
        self, ganesha: Ganesha, jail: Jail, *, task_status: trio.TaskStatus[None]
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, ganesha)
            code = await ganesha.run(jail, is_left=self._is_left, task_status=task_status)
            nursery.cancel_scope.cancel()
        said = "" if code is None else f" with code {code}"
        log.error("NFS-Ganesha (process %d) ended%s", ganesha.pid, said)

    def _is_left(self) -> bool:
        """Returns whether all goes on with the next daemon."""
        return self._node.is_handed_over

    async def _watch(self, ganesha: Ganesha) -> None:
        """Ends a Ganesha that runs but does not answer any more."""
        await ganesha.ready.wait()
        seconds = {"every_s": _ASK_S, "patience_s": _PATIENCE_S}
        await liveness.until_silent(self._address, self._own_ports, **seconds)
        ganesha.complaint = f"it did not answer for {_PATIENCE_S:.0f} s, and was killed"
        ganesha.end()

    # ---- exports

    async def _keep(self, views: MountViews) -> None:
        """Serves the exports, until cancelled."""
        while True:
            with trio.move_on_after(_LOOK_S):
                await self._look.wait()
            self._look = trio.Event()
            self._looks += 1
            try:
                await self._look_once(views)
                self._place.copy_tables()
                await self._clients_state.publish()
            except (KvfsError, OSError) as error:
                log.warning("NFS: what is exported could not be looked at: %s", error)
            self._looked.set()
            self._looked = trio.Event()

    async def _look_once(self, views: MountViews) -> None:
        """Examines the exports: they are served when this returns. Raises KvfsError, OSError."""
        if self._ganesha is None:
            return  # the next one begins with what is exported then
        present = self._place.mounted()
        lost = [each for each in self._served if each not in views or each not in present]
        if lost:
            # Ganesha must not find what lies beneath a view that has gone.
            log.error("NFS: views have gone: NFS-Ganesha is started anew over others")
            self._ganesha.end()
            for number in lost:
                await views.remove(number)
            return
        wanted = await self._wanted()
        await self._read_only.settle(views, wanted)
        is_served = wanted == list(self._served.values()) and self._told is self._ganesha
        if not is_served or self._problems:
            await self._apply(views, wanted)

    async def _wanted(self) -> list[Exported]:
        return await self._node.engine.read(exports.list_all)

    async def _apply(self, views: MountViews, wanted: list[Exported]) -> None:
        """Makes views and Ganesha serve these exports. A removed one is not exported any more
        before its view goes. Raises Unavailable, OSError."""
        problems: dict[int, str] = {}
        ready = {}
        for each in wanted:
            try:
                await self._have_view(views, each)
                ready[each.number] = each
            except (KvfsError, OSError) as error:
                problems[each.number] = str(error)
                if self._problems.get(each.number) != str(error):
                    log.error("NFS: /%s cannot be exported: %s", each.name, error)
        self._problems = problems
        await self._read_only.settle(views, wanted)
        ganesha = self._ganesha
        if ready != self._served or ganesha is None or self._told is not ganesha:
            await trio.to_thread.run_sync(self._write, ready)
            if ganesha is not None:
                await ganesha.reread()
        gone = set(views) - ready.keys()
        self._served, self._told = ready, ganesha
        for number in gone:
            await views.remove(number)

    async def _have_view(self, views: MountViews, exported: Exported) -> None:
        if exported.number not in views:
            directory = await trio.to_thread.run_sync(self._place.view, exported.number)
            await views.add(exported.number, directory)

    def _write(self, exported: Mapping[int, Exported]) -> None:
        address, config, place = self._address, self._config, self._place
        server = Server(
            host=address.host,
            port=address.port,
            mount_port=config.nfs_mount_port,
            with_v3=config.nfs_v3,
            recovery=f"/{place.secrets[1]}/state",
            identity=zlib.crc32(self._identity.encode()),
        )
        place.list_views({each: self._filesystem(each) for each in exported})
        served = [(each, place.path(number)) for number, each in exported.items()]
        text = render(server, served)
        self._lines = dict(zip(first_lines(text), exported, strict=True))
        place.configure(text)

    def _problem_of(self, number: int) -> str:
        """Returns why an export is not served as wanted; empty if it is."""
        if number in self._problems or self._ganesha is None:
            return self._problems.get(number, "")
        left_out = self._ganesha.left_out.items()
        return next((why for line, why in left_out if self._lines.get(line) == number), "")

    def _filesystem(self, number: int) -> uuid.UUID:
        """Returns the id by which handles name an export's filesystem, the same at each start and
        on each node."""
        return uuid.uuid5(_KVFS, f"{self._identity}/{number}")

    async def _close(self, views: MountViews) -> None:
        if self._is_left():
            return
        for number in views:
            await views.remove(number)
        self._served = {}
        try:
            await trio.to_thread.run_sync(self._place.clear)
        except (KvfsError, OSError) as error:
            log.warning("NFS: %s", error)

    # ---- what others ask

    async def _answer_look(self, _params: dict[str, Any]) -> dict[str, Any]:
        """Has the exports examined, from now on. Raises Unavailable if nothing is served."""
        begun = self._looks
        self._look.set()
        with trio.move_on_after(_ANSWER_S):
            while self._ganesha is not None:
                looked = self._looked
                if self._looks > begun:
                    await looked.wait()
                    return await self._report()
                await looked.wait()
        raise Unavailable(f"NFS is not served: {self._problem or 'it takes too long'}")

    async def _answer_adopt(self, params: dict[str, Any]) -> dict[str, Any]:
        """Lets the clients of a node that has ended take back here what they have open and locked.
        Raises what `ClientRecords.of` raises, Unavailable."""
        other, names = await self._clients_state.of(str(params.get("node", "")))
        if names:
            await trio.to_thread.run_sync(self._clients_state.let_return, names)
            before = self._ganesha
            if before is not None:
                before.end()
            with trio.move_on_after(_ANSWER_S):
                while self._ganesha is None or self._ganesha is before:
                    await trio.sleep(_PAUSE_S)
            if self._ganesha is None or self._ganesha is before:
                raise Unavailable(f"NFS is not served: {self._problem or 'it takes too long'}")
        await self._clients_state.forget(other)
        return {"name": other.name, "clients": len(names), "grace_s": GRACE_S}

    async def _answer_clients(self, _params: dict[str, Any]) -> dict[str, Any]:
        return {"clients": await self._clients()}

    async def _clients(self) -> dict[str, int]:
        return await trio.to_thread.run_sync(
            connections.clients, self._address.port, frozenset(self._own_ports)
        )

    async def _report(self) -> dict[str, Any]:
        ganesha, problem = self._ganesha, self._problem
        if ganesha is not None and self._node.mounts.views is None:
            ganesha, problem = None, _NO_MOUNT  # it is about to end
        found = await self._clients()
        return {
            "endpoint": str(self._address),
            "versions": ["3", "4.0", "4.1"] if self._config.nfs_v3 else ["4.0", "4.1"],
            "is_serving": ganesha is not None,
            "problem": "" if ganesha is not None else problem,
            "pid": ganesha.pid if ganesha is not None else 0,
            "restarts": self._restarts,
            "clients": len(found),
            "connections": sum(found.values()),
            "movable_clients": self._clients_state.known,
            "exports": [
                {
                    "namespace": each.name,
                    "allow": list(each.export.allow),
                    "squash": each.export.squash,
                    "read_only": each.export.read_only,
                    "groups": each.export.groups,
                    "problem": self._problem_of(each.number),
                }
                for each in await self._wanted()
            ],
        }


def _identity(node: Node) -> str:
    """Returns the identity of the cluster, which all of its nodes know, else of the store."""
    kept = which_node(node.store)
    return node.store.identity.store if kept is None else kept.cluster
