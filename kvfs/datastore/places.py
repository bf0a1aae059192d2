"""The places of data files beside the store's own directory: memory (tmpfs), further disks,
directories that several nodes share.

| file in the store | content |
|---|---|
| `places` | JSON: the places, as given to the node's last start |
| `run/targets` | JSON: by namespace, the place where new files go now; renewed every second |

Invariants
- A place belongs to one store (a shared one to one cluster): it bears a mark. One with another's
  mark, or a directory with anything else in it, is refused. So is one that anyone else owns, may
  write in or could replace, except the owner that a shared one declares (`kernel.ownership`).
- A place that the settings no longer name is refused while data files lie in it.
- A place whose disk is not mounted is refused: its files would be missing, and new ones would be
  hidden by it later. A disk that is mounted there, and empty, is a new one.
- A process that gets no targets for five seconds makes files in the store's own directory.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from kvfs.base import private_file
from kvfs.base.errors import ConfigError, Corrupt, Invalid, NotSupported, Unavailable
from kvfs.base.media import Place
from kvfs.datastore import quarantine_directory
from kvfs.datastore.kernel.filesystem_probe import filesystem_type
from kvfs.datastore.kernel.ownership import require_directory, trusted
from kvfs.datastore.layout import Store, guarded
from kvfs.meta.lmdb import boot

_IN_MEMORY: Final = ("tmpfs", "ramfs")
MARK: Final = "kvfs-place"
_FORMAT: Final = 1


class _Mark(msgspec.Struct):
    format: int
    owner: str


def prepare(store: Store, places: Sequence[Place], owner: str) -> None:
    """Makes the missing directories, marks them, and tells other processes of the store.

    `owner`: the store or cluster that owns the shared ones. Raises ConfigError, Invalid, ReadOnly,
    NoSpace, AccessDenied (somebody else owns one, or may write in it), Corrupt, NotSupported,
    Unavailable (the disk of one is not mounted)."""
    roots = [place.root for place in places]
    if len(set(roots)) < len(roots) or os.fspath(store.data) in roots:
        raise ConfigError("each tier and each shared store is a directory of its own")
    for old in _told_before(store):
        if old.root in roots:
            _require_mounted(old)
        elif _holds_data(old.root):
            raise ConfigError(
                f"data files lie in {old.root}, which an earlier start was told of: name it again "
                f"({old.flag} {old})"
            )
    for place in places:
        guarded(Path(place.root), lambda place=place: _claim(place, store, owner))  # type: ignore[misc]
    if places or (store.root / "places").exists():
        found = [replace(each, mount_point=_mount_point(each.root)) for each in places]
        private_file.replace(store.root / "places", msgspec.json.encode(found))


def known(store: Store) -> list[Place]:
    """Returns the places as given to the last start. Raises Corrupt."""
    try:
        return _decode_places((store.root / "places").read_bytes())
    except FileNotFoundError:
        return []
    except msgspec.MsgspecError:
        raise Corrupt(
            f"{store.root / 'places'} cannot be read: start the node once with all its --tier and "
            "--shared, which writes it anew"
        ) from None


def _told_before(store: Store) -> list[Place]:
    with contextlib.suppress(Corrupt):
        return known(store)
    return []


def boot_of(store: Store) -> int:
    """Returns the running boot, as the disks of the store see it: another one once one of them was
    unmounted. Places in memory, or shared with others, do not count. Raises OSError."""
    tiers = [place.root for place in known(store) if place.medium == "ssd"]
    return boot.boot_of(store.meta, store.data, *filter(os.path.exists, tiers))


def _claim(place: Place, store: Store, owner: str) -> None:
    root = Path(place.root)
    require(place, make=True)
    if place.medium == "ram" and filesystem_type(root) not in _IN_MEMORY:
        raise ConfigError(
            f"{root} is on {filesystem_type(root) or 'a disk'}, not in memory: mount a tmpfs "
            "there, or name it as ssd"
        )
    owner = owner if place.is_shared else store.identity.store
    with contextlib.suppress(FileExistsError):
        _mark(root, owner)
    found = _read_mark(root)
    if found.owner != owner:
        raise Invalid(f"{root} holds data of another store ({found.owner}): name an empty one")


def _require_mounted(place: Place) -> None:
    root = Path(place.root)
    if not place.mount_point or os.path.ismount(place.mount_point) or (root / MARK).exists():
        return
    raise Unavailable(
        f"nothing is mounted at {place.mount_point}, where {root} lay at the last start: mount its"
        f" disk. If what it had is lost, start once without {place.flag} {place}"
    )


def _mount_point(root: str) -> str:
    path = os.path.realpath(root)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _read_mark(root: Path) -> _Mark:
    """Raises Corrupt, NotSupported."""
    try:
        found = msgspec.json.decode((root / MARK).read_bytes(), type=_Mark)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{root / MARK} is damaged ({error}): restore it from a backup") from None
    if found.format != _FORMAT:
        raise NotSupported(
            f"{root} has format {found.format}, this version of KVFS knows {_FORMAT}: use the"
            " version that made it"
        )
    return found


def owners_of(place: Place) -> frozenset[int]:
    """Returns the users that may own the place and its files."""
    return trusted(place.owner)


def require(place: Place, *, make: bool = False) -> None:
    """Raises what `ownership.require_directory` raises."""
    what = "the shared directory" if place.is_shared else "the tier"
    require_directory(Path(place.root), what, owners_of(place), make=make)


def _mark(root: Path, owner: str) -> None:
    """Marks a place. Raises FileExistsError if it has a mark, of any owner; Invalid if other files
    are there."""
    if not (root / MARK).exists() and (others := os.listdir(root)):
        raise Invalid(f"{root} holds files that are not of KVFS ('{min(others)}' for one)")
    draft = root / f".{MARK}.{os.getpid()}"
    try:
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(_Mark(_FORMAT, owner)))
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, root / MARK)
    finally:
        draft.unlink(missing_ok=True)
    private_file.sync_directory(root)


def _holds_data(root: str) -> bool:
    """Returns whether the place holds data files. A quarantine counts: a file in it may be the last
    copy."""
    return any(Path(root).glob("???/*")) or any(
        Path(root, quarantine_directory.DIRECTORY).glob("*")
    )


def write_targets(store: Store, targets: dict[int, str]) -> None:
    """Writes the root of the place where the new files of each namespace id go now. Nobody needs it
    after a power cut."""
    path = store.run / "targets"
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(msgspec.json.encode(targets))
    os.rename(draft, path)


_decode_places = msgspec.json.Decoder(list[Place]).decode
decode_targets: Final = msgspec.json.Decoder(dict[int, str]).decode
