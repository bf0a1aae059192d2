"""Whether a node's mount outlives its daemon, and the mount that outlived the daemon before."""

import contextlib
import logging
import os
import select
import signal
from collections.abc import Collection
from typing import Final

import msgspec

from gateway.fuse import mount
from gateway.fuse.channel import device, mode_probe
from gateway.fuse.files.kernel_inodes import ino_of
from gateway.fuse.mount import Agreement, Outliving
from gateway.fuse.views.kept_views import KeptItem, views_of
from gateway.holder import claim, holder_process
from gateway.holder.claim import KeptMount
from gateway.holder.holding import HandOver
from gateway.holder.mount_journal import NOBODY, VIEWED, State
from gateway.nfs.jail_control import JailControl, TakenJail, wish
from gateway.node_start import Start
from kvfs.base.config import Config
from kvfs.base.errors import NotFound
from kvfs.datastore.layout import Store
from kvfs.meta.records import namespace_of
from kvfs.node.survivors import SurvivingHandle, Survivors

_END_S: Final = 10
log = logging.getLogger(__name__)


def obstacle(config: Config) -> str:
    """Returns why this node's mount cannot outlive its daemon, though its settings ask for that;
    empty: it can."""
    found = mode_probe.takeover()
    if not found.available:
        return found.reason
    if config.mode == "libfuse":
        return "a node with the setting mode libfuse cannot go on with the mount of another"
    return ""


class Takeover:
    """The part of one daemon in handing mounts on."""

    def __init__(self, config: Config, start: Start) -> None:
        self._config = config
        self._start = start
        self._taken: KeptMount | None = None
        self._jail: JailControl | None = None
        self._kept: dict[str, KeptItem] | None = None
        """The things that are kept of the mount's views."""
        self.hand_over = HandOver()
        self.is_wanted = config.takeover_s > 0
        why = obstacle(config) if self.is_wanted else ""
        if why:
            log.warning("the mount ends with this daemon, in spite of takeover_s: %s", why)
            self.is_wanted = False

    def inherit(self, store: Store) -> Survivors | None:
        """Takes the mount that the daemon before left; returns what programs have open by it. One
        that this node cannot go on with is ended; if it is there for nothing else, that waits on,
        and NotFound is raised."""
        taken = claim.take(store.run)
        self._jail = JailControl(store.run)
        if taken is None:
            with contextlib.suppress(OSError):
                self._jail.kill()
            if self._start.takes_over:
                raise NotFound(f"no mount of the store {store.root} waits for another daemon")
            return None
        jail = self._jail.take()
        why = self._why_not(taken)
        if why:
            if self._start.takes_over:
                raise NotFound(f"the mount of the store {store.root} cannot be gone on with: {why}")
            log.warning("the mount of the node before cannot be gone on with: %s", why)
            taken.journal.close()
            os.close(taken.device)
            os.close(taken.holder)
            _end_views(self._jail, jail)
            claim.give_up(store.run)
            return None
        if jail is not None and jail.about["wish"] != wish(self._config):
            log.warning("NFS-Ganesha ends with the node before: its settings are others now")
            _end_views(self._jail, jail)
            jail = None
        self._taken = taken
        self.hand_over.is_starting = True
        taken.journal.take_over()
        self._kept = jail.items if jail is not None else None
        return _survivors(taken, views_of(jail.items) if jail is not None else ())

    def _why_not(self, taken: KeptMount) -> str:
        if not self.is_wanted or not self._start.mounted:
            return "this one has no mount that outlives its daemon"
        try:
            agreed = msgspec.msgpack.decode(taken.journal.about(), type=Agreement)
        except msgspec.MsgspecError:
            return "it was not served yet, or by another version"
        wanted = mount.options(self._config, self._config.mount, agreed.options.hides)
        if wanted != agreed.options:
            return "the settings of the mount are others now"
        if agreed.locks and not self._config.engine:
            return "it has the locks of a cluster, and this node is in none"
        where = agreed.options.mountpoint
        has_gone = holder_process.has_gone(taken.device) or not device.is_ours(where)
        return "it was unmounted" if has_gone else ""

    def outliving(self) -> Outliving | None:
        """Returns how the next mount of this node is made, or gone on with; None: it ends with its
        daemon."""
        if not self.is_wanted:
            return None
        taken, self._taken = self._taken, None
        config = self._config
        kept, self._kept = self._kept, None
        return Outliving(
            config.store / "run",
            config.takeover_s,
            self._start.successor,
            self.hand_over,
            taken,
            self._jail if kept is not None else None,
            kept or {},
        )


def _survivors(taken: KeptMount, views: Collection[int]) -> Survivors:
    """`views`: the namespaces of the views that outlived the daemon, too."""
    taken.journal.locks.forget_views(views)
    files = []
    for entry, each in list(taken.journal.files()):
        if each.request & VIEWED and namespace_of(each.number) not in views:
            taken.journal.released(entry)
        else:
            files.append((entry, each))
    handles = [
        SurvivingHandle(
            each.fh,
            each.number,
            ino_of(each.number),
            each.version,
            each.flags,
            None if each.owner == NOBODY else each.owner,
            each.request,
            entry,
            namespace_of(each.number) if each.request & VIEWED else 0,
            bool(each.is_cut),
        )
        for entry, each in files
    ]
    noted = [each.ino for each in taken.journal.notes().values() if each.state is not State.PLACED]
    return Survivors(handles, noted)


def _end_views(control: JailControl, jail: TakenJail | None) -> None:
    """Ends the Ganesha of the daemon before, and then its views."""
    if jail is None:
        return
    with contextlib.suppress(OSError):
        control.kill()
    ended = select.poll()
    ended.register(jail.pidfd, select.POLLIN)
    if not ended.poll(_END_S * 1000):
        signal.pidfd_send_signal(jail.pidfd, signal.SIGKILL)
    for each in (jail.pidfd, *(fd for item in jail.items.values() for fd in item.fds)):
        os.close(each)
