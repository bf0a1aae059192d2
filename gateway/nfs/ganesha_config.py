"""NFS-Ganesha's configuration. Pure.

| setting | reason |
|---|---|
| Attr_Expiration_Time, Dir_Chunk = 0 | attributes and listings are kept by the kernel alone |
| LRU_Run_Interval, FD_... | descriptors are kept for a second: v3 has no close |
| Enable_UDP, NLM, RQUOTA = false | one port of TCP; without a port mapper |
| Lease_Lifetime, Grace_Period | clients go on within seconds after a restart |
| Filesystem_Id | by store or cluster and namespace: the same on each node |
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.nfs.exports import Exported

LEASE_S: Final = 10
"""The lease of a client's state in v4."""
GRACE_S: Final = 10
"""Seconds after a start in which clients may only reclaim their state, in v4."""
GROUPS_S: Final = 2
"""Seconds for which a user's groups are believed, if this host tells them."""
_SQUASH: Final = {"none": "No_Root_Squash", "root": "Root_Squash", "all": "All_Squash"}
_NOBODY: Final = 65534
_BEGIN: Final = "EXPORT {"


class Server(NamedTuple):
    """The settings of the whole server."""

    host: str
    port: int
    mount_port: int
    """The port of v3's MOUNT protocol."""
    with_v3: bool
    recovery: str
    """The directory for clients' state, as Ganesha sees it."""
    identity: int
    """The identity of the store or the cluster; 32 bits."""


def render(server: Server, exports: Sequence[tuple[Exported, str]]) -> str:
    """Returns the whole file, with the directory of each export as Ganesha sees it."""
    return "\n".join([_core(server), *(_export(server, *each) for each in exports)]) + "\n"


def first_lines(text: str) -> list[int]:
    """Returns the lines where exports begin in a whole file, by which Ganesha names them in its
    log."""
    return [number for number, line in enumerate(text.splitlines(), 1) if line == _BEGIN]


def _protocols(server: Server) -> str:
    return "3, 4" if server.with_v3 else "4"


def _core(server: Server) -> str:
    v3 = f"    MNT_Port = {server.mount_port};\n" if server.with_v3 else ""
    return f"""\
NFS_CORE_PARAM {{
    Bind_addr = {server.host};
    NFS_Port = {server.port};
{v3}    Protocols = {_protocols(server)};
    Enable_UDP = false;
    Enable_NLM = false;
    Enable_RQUOTA = false;
    mount_path_pseudo = true;
    Manage_Gids_Expiration = {GROUPS_S};
}}
NFSv4 {{
    Minor_Versions = 0, 1;
    Lease_Lifetime = {LEASE_S};
    Grace_Period = {GRACE_S};
    RecoveryBackend = fs;
    RecoveryRoot = "{server.recovery}";
    Only_Numeric_Owners = true;
    Delegations = false;
}}
NFS_KRB5 {{ Active_krb5 = false; }}
MDCACHE {{
    Dir_Chunk = 0;
    LRU_Run_Interval = 1;
    FD_LWMark_Percent = 0;
    FD_HWMark_Percent = 90;
    Reaper_Work_Per_Lane = 100000;
}}
"""


_HALVES: Final = {"0.0.0.0/0": "0.0.0.0/1, 128.0.0.0/1", "::/0": "::/1, 8000::/1"}
"""Networks of everybody, in halves: a prefix of no length is a path to Ganesha, or the end of its
file."""


def _client(network: str) -> str:
    """Returns a network, or an address, as Ganesha reads them."""
    if network in _HALVES:
        return _HALVES[network]
    return network.removesuffix("/32").removesuffix("/128")


def _export(server: Server, exported: Exported, directory: str) -> str:
    export = exported.export
    access = "RO" if export.read_only else "RW"
    # Of version 3 Ganesha checks no name for slashes; whoever is not root is stopped by the
    # directory above the exports.
    protocols = "4" if export.squash == "none" else _protocols(server)
    return f"""\
{_BEGIN}
    Export_Id = {exported.number};
    Path = "{directory}";
    Pseudo = "/{exported.name}";
    Filesystem_Id = {server.identity}.{exported.number};
    Protocols = {protocols};
    Transports = TCP;
    SecType = sys;
    Access_Type = None;
    Attr_Expiration_Time = 0;
    UseCookieVerifier = false;
    CLIENT {{
        Clients = {", ".join(map(_client, export.allow))};
        Protocols = {protocols};
        Access_Type = {access};
        Squash = {_SQUASH[export.squash]};
        Anonymous_Uid = {_NOBODY};
        Anonymous_Gid = {_NOBODY};
        Manage_Gids = {"true" if export.groups == "server" else "false"};
    }}
    FSAL {{ Name = VFS; }}
}}
"""
