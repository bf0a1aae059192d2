"""`kvfs doctor`: for each accelerated path whether it is available and active, the reason if not,
and how to get it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cli import node_requests, settings_options
from cli.commands.service.doctor_line import DoctorLine, show
from kvfs.base.config import Config
from kvfs.base.errors import KvfsError

if TYPE_CHECKING:
    from gateway.fuse.channel.mode_probe import AcceleratedPath

_SILENT_S: Final = 2.0
"""Time after which a shared engine counts as silent: it is asked twice a second."""


@click.command("doctor")
@settings_options.configured("store")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(config: Config, as_json: bool) -> None:
    """Tell which accelerated paths are available and active.

    For each that is not, gives the reason and how to get it. 'active' needs a running node; without
    one the machine is examined all the same.
    """
    status = _status(config)
    lines = list(examine(_existing(config.store), status))
    if as_json:
        report = {"running": status is not None, "paths": msgspec.to_builtins(lines)}
        click.echo(json.dumps(report))
        return
    if status is None:
        click.echo(f"no node runs on {config.store}: what is active is not known\n")
    for line in lines:
        click.echo(show(line))


def examine(directory: Path, status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """Yields every accelerated path of a store in `directory`, as `status` shows it in use."""
    yield from _modes(directory, status)
    yield from _probed(status)
    yield _access_lists()
    yield _readahead(status)
    yield _priority(status)
    yield _descriptors(status)
    yield from _store(directory)
    yield from _tiers(status)
    yield _leases(directory)
    yield _engine(status)
    yield from _readers(status)
    yield from _locks(status)
    yield from _names(status)
    yield _transport(status)
    yield from _shared_engine(status)
    yield from _s3(status)
    yield _nfs(status)
    from cli.commands.service import doctor_confinement, doctor_loads, doctor_tls

    yield from doctor_tls.lines(status)
    yield from doctor_confinement.lines(status)
    yield from doctor_loads.lines(directory)


def _status(config: Config) -> dict[str, Any] | None:
    try:
        status: dict[str, Any] = node_requests.ask(config, "status")
    except KvfsError:
        return None
    return status


def _existing(path: Path) -> Path:
    """Returns the store, or the directory where it would be made."""
    while not path.is_dir():
        path = path.parent
    return path


def _modes(directory: Path, status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    from gateway.fuse.channel import mode_probe

    mount = status["mount"] if status else None
    for found in mode_probe.probe_modes(str(directory)):
        active = None if status is None else mount is not None and mount["mode"] == found.name
        # What the mount found when it tried says more than the probe.
        is_tried = found.name == "passthrough" and found.available and not active
        yield _line(found, active, mount["reason"] if mount and is_tried else "")


def _probed(status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    from gateway.fuse.channel import mode_probe

    mount = status["mount"] if status else None
    for found in (mode_probe.direct_writes(), mode_probe.direct_reads()):
        yield _line(found, mount[found.name.replace(" ", "_")] if mount else None)
    yield _line(mode_probe.cache_drop(), None)
    found = mode_probe.watchdog()
    yield _line(found, None if status is None else found.available and mount is not None)
    outlives = None if mount is None else mount.get("takeover_s", 0) > 0
    yield _line(mode_probe.takeover(), outlives)


def _line(found: "AcceleratedPath", active: bool | None, reason: str = "") -> DoctorLine:
    """Returns the line for what a probe found; `reason`: a better one than the probe's."""
    return DoctorLine(
        name=found.name,
        available=found.available,
        active=active,
        reason=reason or found.reason,
        remedy=found.remedy,
    )


def _leases(directory: Path) -> DoctorLine:
    from kvfs.datastore import file_lease
    from kvfs.datastore.layout import translate

    try:
        supported = file_lease.supported(str(directory))
    except OSError as error:
        raise translate(error, directory) from error
    return DoctorLine(
        name="leases",
        available=supported,
        active=None,
        reason="the kernel says whether a data file is open or mapped, by whomever"
        if supported
        else "who writes by a mapping, or by a mount that is gone, is not seen",
        remedy="" if supported else "a store on ext4, xfs, btrfs or tmpfs",
    )


def _access_lists() -> DoctorLine:
    return DoctorLine(
        name="access lists",
        available=False,
        active=None,
        reason="POSIX ACLs are not kept: setfacl fails (EOPNOTSUPP), cp -a and rsync -A go without",
        remedy="give access by mode bits and groups",
    )


def _readahead(status: dict[str, Any] | None) -> DoctorLine:
    mount = status["mount"] if status else None
    kib = mount["readahead_kib"] if mount else 0
    if kib:
        return DoctorLine(
            name="readahead", available=True, active=True, reason=f"{kib} KiB, set in the kernel"
        )
    return DoctorLine(
        name="readahead",
        available=mount is None,
        active=None if mount is None else False,
        reason="set when mounted"
        if mount is None
        else "the kernel's 128 KiB: its setting may not be changed",
        remedy="" if mount is None else "run as root, with /sys writable",
    )


def _priority(status: dict[str, Any] | None) -> DoctorLine:
    """The node's turn at a busy CPU."""
    from kvfs.base import priority

    may = priority.may_raise()
    nice = status["nice"] if status else None
    remedy = "" if may else "run as root, or with LimitNICE=-10 (ulimit -e 30)"
    if nice is None:
        reason = "may be raised" if may else "a raised one needs CAP_SYS_NICE or RLIMIT_NICE"
        return DoctorLine(name="priority", available=may, active=None, reason=reason, remedy=remedy)
    reason = f"the node's nice value is {nice}"
    if nice >= 0:
        reason += ": its users wait for other programs where the CPU is busy"
        remedy = remedy or "the setting `priority`"
    return DoctorLine(name="priority", available=may, active=nice < 0, reason=reason, remedy=remedy)


def _descriptors(status: dict[str, Any] | None) -> DoctorLine:
    """The number of files that programs may hold open."""
    from kvfs.base import descriptors

    most = descriptors.most_of_system()
    had = status["descriptors"]["limit"] if status else None
    may = descriptors.may_raise() or descriptors.hard_limit() >= most
    limit = had or (most if may else descriptors.hard_limit())
    is_raised = limit >= most
    reason = f"the node {'may have' if status is None else 'has'} {limit:,}"
    if not is_raised:
        reason += f", its hard limit, of {most:,}: a higher one needs CAP_SYS_RESOURCE"
    return DoctorLine(
        name="descriptors",
        available=may,
        active=None if status is None else is_raised,
        reason=reason,
        remedy="" if is_raised else f"run as root, or with LimitNOFILE={most} (ulimit -n {most})",
    )


def _store(directory: Path) -> Iterator[DoctorLine]:
    from gds.io.direct_io import alignment_in
    from kvfs.datastore.kernel.filesystem_probe import probe

    direct = alignment_in(directory)
    asks = f", in {direct.offset} bytes, from memory in {direct.memory}" if direct else ""
    facts = probe(directory)
    where = facts.filesystem or "unknown filesystem"
    better = "a store on xfs (reflink=1) or btrfs"
    for name, fact, remedy in (
        ("reflink", facts.reflink, better),
        ("copy_file_range", facts.copy_file_range, "Linux 5.3 or newer"),
        ("xattrs", facts.xattrs, "a store on ext4, xfs or btrfs"),
        ("O_DIRECT", facts.direct_io, "a store on ext4, xfs or btrfs"),
        ("spare data files", facts.tmpfile, "root, and a store on ext4, xfs or btrfs"),
    ):
        yield DoctorLine(
            name=name,
            available=fact.available,
            active=fact.available,
            reason=f"{where}: {fact.reason}" + (asks if name == "O_DIRECT" else ""),
            remedy="" if fact.available else remedy,
        )


def _tiers(status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """The places beside the store's directory whose disks fail, or are read-only."""
    for each in status["tiers"] if status else ():
        if each["refusal"] is not None:
            yield DoctorLine(
                name="tier",
                available=False,
                active=False,
                reason=f"{each['path']} takes no files: {each['refusal']}",
                remedy="look at its disk and the kernel's log, and mount it anew",
            )


def _readers(status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """A reader of the metadata that does not end."""
    found = status["engine"]["long_reader"] if status else None
    if found is not None:
        reason, _, remedy = found.rpartition(": ")
        yield DoctorLine(
            name="metadata pages", available=False, active=False, reason=reason, remedy=remedy
        )


def _engine(status: dict[str, Any] | None) -> DoctorLine:
    """Commits that need no sync of their own."""
    name = "journal"
    if status is None:
        return DoctorLine(name=name, available=True, active=None, reason="commits wait for no disk")
    failure = status["engine"]["journal_failure"]
    if failure is None and (damaged := status["engine"]["damaged_metadata"]):
        reason = f"a start found damage in it, and gave up what its log says: {damaged[0]} keeps it"
        remedy = "look at the disk, run `kvfs fsck` on the stopped node, then remove that file"
        return DoctorLine(name=name, available=True, active=True, reason=reason, remedy=remedy)
    if failure is None:
        return DoctorLine(name=name, available=True, active=True, reason="commits wait for no disk")
    remedy = "look at the disk; a restart of the node tries again"
    return DoctorLine(name=name, available=False, active=False, reason=failure, remedy=remedy)


def _locks(status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """The locks of a cluster, if programs have lost some."""
    lost = status["counters"].get("locks_lost", 0) if status else 0
    if lost:
        yield DoctorLine(
            name="locks",
            available=True,
            active=True,
            reason=f"programs have lost {lost} of them since the start: the node had no lease",
            remedy="look in its log when it had lost touch with its cluster, and why",
        )


def _names(status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """The names that other nodes hold, of namespaces that nodes keep, if there are any."""
    names = (status["cluster"] or {}).get("names") if status and "cluster" in status else None
    if names is None:
        return
    if names["is_full"]:
        yield DoctorLine(
            name="names of nodes",
            available=False,
            active=False,
            reason=f"their table is full: of {names['others']} names and more some are not found",
            remedy="remove names that nobody reads, or lower --names-everywhere on all nodes",
        )
        return
    reason = f"{names['others']} names of {names['members'] - 1} other nodes are known here"
    if (homes := names["homes"]) is not None:
        unanswered = status["counters"]["home_questions_unanswered"] if status else 0
        reason += f", and others are asked of the {homes['nodes']} nodes that are their homes"
        if unanswered:
            reason += f"; {unanswered} questions were not answered since the start"
    if names["lagging"]:
        reason += f", and {names['lagging']} nodes have told more than has come"
    yield DoctorLine(name="names of nodes", available=True, active=True, reason=reason)


def _transport(status: dict[str, Any] | None) -> DoctorLine:
    """The transport of data from other nodes."""
    from kvfs.base.errors import NotSupported
    from kvfs.transfer.rdma.transfer_process import require

    name, available, reason = "transport rdma", True, "off: data come from other nodes over TCP"
    remedy = "" if status is None else "--transport rdma"
    try:
        require()
    except NotSupported as error:
        available, remedy = False, "pip install 'kvfs[rdma]'"
        reason = f"{error}: data come over TCP"
    cluster = status.get("cluster") if status else None
    used = cluster["rdma"] if cluster else None
    if used is None:
        active = None if status is None else False
        return DoctorLine(
            name=name, available=available, active=active, reason=reason, remedy=remedy
        )
    if not used["over"]:
        reason = f"{used['reason']}: data come over TCP"
        return DoctorLine(
            name=name, available=True, active=False, reason=reason, remedy="the node's log"
        )
    if used["over"] == "rdma":
        return DoctorLine(
            name=name, available=True, active=True, reason="Mooncake's engine over RDMA"
        )
    reason = "Mooncake's engine over its own TCP: this host has no RDMA device"
    return DoctorLine(
        name=name, available=True, active=True, reason=reason, remedy="an RDMA device"
    )


def _shared_engine(status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """The engine that the nodes of a cluster share, and the server that has it now."""
    engine = status["engine"] if status else {}
    if "silent_s" not in engine:
        return
    is_heard = engine["silent_s"] < _SILENT_S
    silence = "" if is_heard else f", silent for {engine['silent_s']:.0f} s"
    for shard in engine.get("shards", ()):
        if shard["name"]:
            is_there = shard["silent_s"] < _SILENT_S
            yield DoctorLine(
                name=f"shard of {shard['name']}",
                available=is_there,
                active=is_there,
                reason=f"by {shard['server']}"
                + ("" if is_there else f", silent for {shard['silent_s']:.0f} s"),
                remedy="" if is_there else "see that it runs, and its log",
            )
    yield DoctorLine(
        name="shared engine",
        available=is_heard,
        active=is_heard,
        reason=f"{engine['name']}, by {engine['server']}{silence}",
        remedy="" if is_heard else engine.get("loss") or "see that it runs, and its log",
    )
    if engine["mirror_refusal"] is not None:
        reason, _, remedy = engine["mirror_refusal"].rpartition(": ")
        yield DoctorLine(
            name="metadata replica", available=False, active=False, reason=reason, remedy=remedy
        )


def _s3(status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """The facilities that the S3 API rests on."""
    s3 = status.get("s3") if status else None
    served = None if status is None else s3 is not None
    yield _s3_workers(served, s3)
    tls = bool(s3 and s3["tls"])
    yield DoctorLine(
        name="s3 sendfile",
        available=True,
        active=None if served is None else served and not tls,
        reason="bodies are encrypted here, and copied for it" if tls else "the kernel sends bodies",
        remedy="leave TLS to the network, where it may be" if tls else "",
    )
    yield _s3_checksums(served)
    yield DoctorLine(
        name="s3 symbolic links",
        available=False,
        active=None if served is None else False,
        reason="what is a link on the mount is no object",
        remedy="copies without links (cp -rL); Hugging Face: a download with local_dir",
    )
    how = s3["encryption"] if s3 else ""
    yield DoctorLine(
        name="s3 SSE",
        available=bool(how),
        active=None if served is None else bool(how),
        reason=f"AES256 is accepted: {how}" if how else "the storage is not known to be encrypted",
        remedy="" if how else "the store on fscrypt or dm-crypt, or encrypted_storage = yes",
    )


def _nfs(status: dict[str, Any] | None) -> DoctorLine:
    """NFS-Ganesha and its requirements."""
    from gateway.nfs import requirements

    name, lacks = "nfs", requirements.lacks()
    nfs = status.get("nfs") if status else None
    if lacks:
        what = "; ".join(each.what for each in lacks)
        remedy = "; ".join(each.remedy for each in lacks)
        active = None if status is None else False
        return DoctorLine(name=name, available=False, active=active, reason=what, remedy=remedy)
    if nfs is None:
        active, remedy = (None, "") if status is None else (False, "kvfs up --nfs")
        reason = "NFS-Ganesha is installed; NFS is off" if status else "NFS-Ganesha is installed"
        return DoctorLine(name=name, available=True, active=active, reason=reason, remedy=remedy)
    served = bool(nfs["is_serving"])
    exported = nfs["exports"]
    reason = f"{nfs['endpoint']}, {len(exported)} exports" if served else nfs["problem"]
    lacking = [f"/{each['namespace']}: {each['problem']}" for each in exported if each["problem"]]
    if served and lacking:
        reason += f", not served: {'; '.join(lacking)}"
    if served and any(each["groups"] == "server" for each in exported):
        reason += ", --groups server asks /etc/group alone, no directory service"
    remedy = "" if served and not lacking else "the node's log says more"
    return DoctorLine(name=name, available=True, active=served, reason=reason, remedy=remedy)


def _s3_workers(served: bool | None, s3: dict[str, Any] | None) -> DoctorLine:
    name = "s3 workers"
    if s3 is None:
        reason = "no node runs" if served is None else "S3 is off"
        remedy = "" if served is None else "kvfs up without --no-s3"
        return DoctorLine(name=name, available=True, active=served, reason=reason, remedy=remedy)
    running, wanted = len(s3["workers"]), s3["wanted_workers"]
    reason = f"{running} of {wanted} at {s3['endpoint']}, {s3['restarts']} restarts"
    whole = running == wanted
    remedy = "" if whole else "the node's log says why they end"
    return DoctorLine(name=name, available=whole, active=running > 0, reason=reason, remedy=remedy)


def _s3_checksums(served: bool | None) -> DoctorLine:
    """The checksums of S3: awscrt computes CRCs with the CPU's own instructions if it has them."""
    name = "s3 hardware CRC"
    try:
        from awscrt import checksums
    except ImportError as error:
        return DoctorLine(
            name=name,
            available=False,
            active=False,
            reason=f"awscrt cannot be loaded ({error}): no S3",
            remedy="./dev installs it",
        )
    assert checksums.crc32c(b"123456789") == 0xE3069283
    with open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith(("flags", "Features"))), "").split()
    able = "pclmulqdq" in flags or "crc32" in flags
    return DoctorLine(
        name=name,
        available=able,
        active=served and able if served is not None else None,
        reason="awscrt uses the CPU's instructions" if able else "the CPU lacks them: tables",
        remedy="" if able else "a CPU with PCLMULQDQ or CRC32",
    )
