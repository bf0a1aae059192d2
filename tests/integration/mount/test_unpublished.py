"""A file before its first close: random operations on a mount, and beside it by a client, against a
plain directory; the daemon is killed in between."""

import contextlib
import errno
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import kvfs
from kvfs.base.errors import KvfsError
from tests.integration.harness import Node
from tests.integration.harness import kvfs as run_kvfs

NewNode = Callable[..., Node]
ROUNDS = int(os.environ.get("KVFS_TEST_ROUNDS", "4"))
OPERATIONS = 120
NAMES = ("a", "b", "c", "d/a", "d/b", "e/a", "e/f/a")
DIRECTORIES = ("d", "e", "e/f", "g")


class Both:
    """A directory of the mount and its model. Each operation is done in both and ends alike."""

    def __init__(self, node: Node, model: Path, seed: int) -> None:
        self.node = node
        self.top = node.mount / "durable"
        self.model = model
        self.random = random.Random(seed)
        self.open: dict[int, int] = {}
        """By a descriptor of the mount, that of the model."""
        self.unpublished: set[int] = set()
        """Files of the model that were never closed nor synced."""
        self.done: list[str] = []

    def name(self) -> str:
        return self.random.choice(NAMES)

    def step(self) -> None:
        weights = {
            **dict.fromkeys((self.create, self.write, self.close, self.exchange), 3),
            **dict.fromkeys((self.rename, self.unlink, self.mkdir), 2),
            **dict.fromkeys((self.link, self.truncate, self.rmdir, self.chmod, self.stamp), 1),
            **dict.fromkeys((self.setxattr, self.sync, self.whole), 1),
            **dict.fromkeys((self.put, self.client_rmdir, self.client_remove), 1),
        }
        (operation,) = self.random.choices([*weights], [*weights.values()])
        self.done.append(operation.__name__)
        operation()
        self.compare()

    def both(self, work: Callable[[Path], object]) -> bool:
        """Whether it was done."""
        ends = []
        for top in (self.model, self.top):
            try:
                work(top)
                ends.append(0)
            except OSError as error:
                ends.append(error.errno or -1)
        assert ends[0] == ends[1], self.tell(f"{errno.errorcode.get(ends[1], ends[1])}", ends)
        return not ends[0]

    def tell(self, *what: object) -> str:
        return "\n".join(map(str, (*what, *self.done[-40:])))

    # ---- by the mount

    def create(self) -> None:
        name = self.name()
        flags = os.O_CREAT | os.O_RDWR | self.random.choice((0, os.O_EXCL, os.O_TRUNC))
        fds: list[int] = []
        is_new = not (self.model / name).exists()
        if not self.both(lambda top: fds.append(os.open(top / name, flags, 0o640))):
            return
        self.done[-1] += f" {name}"
        model, fd = fds
        self.open[fd] = model
        if is_new:
            self.unpublished.add(os.fstat(model).st_ino)

    def opened(self) -> int | None:
        return self.random.choice(list(self.open)) if self.open else None

    def write(self) -> None:
        if (fd := self.opened()) is None:
            return
        data, at = self.random.randbytes(self.random.randrange(1, 9000)), self.random.randrange(999)
        assert os.pwrite(fd, data, at) == os.pwrite(self.open[fd], data, at)

    def close(self) -> None:
        if (fd := self.opened()) is None:
            return
        model = self.open.pop(fd)
        self.unpublished.discard(os.fstat(model).st_ino)
        os.close(fd)
        os.close(model)

    def sync(self) -> None:
        if (fd := self.opened()) is None:
            return
        self.unpublished.discard(os.fstat(self.open[fd]).st_ino)
        os.fsync(fd)

    def truncate(self) -> None:
        size = self.random.randrange(5000)
        if (fd := self.opened()) is not None:
            os.ftruncate(fd, size)
            os.ftruncate(self.open[fd], size)
            if self.random.random() < 0.5:
                return
        name = self.name()
        # Of a file that is open, and was never closed, this publishes nothing.
        self.both(lambda top: os.truncate(top / name, size))

    def rename(self) -> None:
        old, new = self.random.sample((*NAMES, *DIRECTORIES), 2)
        self.done[-1] += f" {old} {new}"
        source, target = self.model / old, self.model / new
        replaces = source.is_file() and target.is_file() and not source.samefile(target)
        if self.both(lambda top: os.rename(top / old, top / new)) and replaces:
            # What replaces a file is on disk first, so it is published.
            self.unpublished.discard(target.stat().st_ino)

    def exchange(self) -> None:
        """Write a block as caches do: under another name, then renamed, before its close or after
        it."""
        name, is_early = self.name(), self.random.random() < 0.5
        data = self.random.randbytes(self.random.randrange(9000))

        def work(top: Path) -> None:
            temporary = top / (name + ".tmp")
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            try:
                os.write(fd, data)
                if is_early:
                    os.rename(temporary, top / name)
            finally:
                os.close(fd)
            if not is_early:
                try:
                    os.rename(temporary, top / name)
                except OSError:
                    os.unlink(temporary)
                    raise

        self.done[-1] += f" {name} {is_early}"
        self.both(work)
        for top in (self.model, self.top):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (top / (name + ".tmp")).unlink()

    def link(self) -> None:
        old, new = self.name(), self.name()
        self.done[-1] += f" {old} {new}"
        self.both(lambda top: os.link(top / old, top / new))

    def unlink(self) -> None:
        name = self.name()
        self.done[-1] += f" {name}"
        self.both(lambda top: os.unlink(top / name))

    def mkdir(self) -> None:
        name = self.random.choice((*DIRECTORIES, *NAMES))
        self.done[-1] += f" {name}"
        self.both(lambda top: os.mkdir(top / name))

    def rmdir(self) -> None:
        name = self.random.choice(DIRECTORIES)
        self.done[-1] += f" {name}"
        self.both(lambda top: os.rmdir(top / name))

    def chmod(self) -> None:
        name, mode = self.name(), self.random.choice((0o600, 0o644, 0o755))
        self.both(lambda top: os.chmod(top / name, mode))

    def stamp(self) -> None:
        name, times = self.name(), (self.random.randrange(10**18), self.random.randrange(10**18))
        self.both(lambda top: os.utime(top / name, ns=times))

    def setxattr(self) -> None:
        name, value = self.name(), self.random.randbytes(9)
        self.both(lambda top: os.setxattr(top / name, "user.k", value))

    def whole(self) -> None:
        name, data = self.name(), self.random.randbytes(self.random.randrange(3000))

        def work(top: Path) -> None:
            fd = os.open(top / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
            os.write(fd, data)
            os.close(fd)

        if self.both(work):
            self.unpublished.discard((self.model / name).stat().st_ino)

    # ---- beside it

    def by_client(self, work: Callable[[kvfs.Client], object], model: Callable[[], object]) -> None:
        """In the model it is done where the client could, and only there."""
        try:
            with kvfs.Client(self.node.store) as client:
                work(client)
        except (KvfsError, OSError) as error:
            self.done[-1] += f" {type(error).__name__}"
            return
        model()

    def put(self) -> None:
        """Over what is there, closed or not."""
        name, data = self.name(), self.random.randbytes(self.random.randrange(3000))
        self.done[-1] += f" {name}"
        target = self.model / name
        is_file = target.parent.is_dir() and not target.is_dir()

        def model() -> None:
            assert is_file, self.tell("put where no file can be")
            made = self.model / "put"
            made.write_bytes(data)
            made.chmod(0o644)
            made.rename(target)

        self.by_client(lambda client: client.put(f"durable/{name}", data), model)
        if is_file:
            assert target.read_bytes() == data, self.tell("a put was refused")

    def client_rmdir(self) -> None:
        """A child that is not closed yet keeps its directory."""
        name = self.random.choice(DIRECTORIES)
        self.done[-1] += f" {name}"
        self.by_client(
            lambda client: client.rmdir(f"durable/{name}"), lambda: os.rmdir(self.model / name)
        )

    def client_remove(self) -> None:
        """What is not closed yet it does not see."""
        name = self.name()
        self.done[-1] += f" {name}"
        target = self.model / name
        hidden = target.is_file() and target.stat().st_ino in self.unpublished

        def model() -> None:
            assert not hidden, self.tell("a file was removed before its first close")
            os.unlink(target)

        self.by_client(lambda client: client.remove(f"durable/{name}"), model)
        if not hidden:
            assert not target.is_file(), self.tell("a file was not removed")

    # ---- what is there

    def compare(self) -> None:
        assert shown(self.top) == shown(self.model), self.tell("the mount differs")

    def kill(self) -> None:
        """What was closed or synced once stays, with all that was written since."""
        self.node.kill()
        for fd, model in self.open.items():
            with contextlib.suppress(OSError):
                os.close(fd)
            os.close(model)
        self.open.clear()
        for path in list(self.model.rglob("*")):
            if not path.is_dir() and path.stat().st_ino in self.unpublished:
                path.unlink()
        self.unpublished.clear()
        self.done.append("kill")
        self.node.up()
        self.compare()


def shown(top: Path) -> dict[str, object]:
    return {str(path.relative_to(top)): _shown(path) for path in top.rglob("*")}


def _shown(path: Path) -> object:
    st = path.lstat()
    if stat.S_ISDIR(st.st_mode):
        return "directory", st.st_nlink
    attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return path.read_bytes(), st.st_nlink, stat.filemode(st.st_mode), attributes


def leaks(node: Node) -> list[str]:
    """Data files beyond those of the names that are there."""
    numbers = {f"{path.lstat().st_ino:016x}" for path in node.mount.rglob("*") if path.is_file()}
    files = (each for each in (node.store / "data").rglob("*.*") if each.is_file())
    return [each.name for each in files if each.stem not in numbers]


def test_random_operations_with_kills(new_node: NewNode, tmp_path: Path, seed: int) -> None:
    node = new_node()
    model = tmp_path / "model"
    model.mkdir()
    (node.mount / "durable").mkdir()
    both = Both(node, model, seed)
    for _ in range(ROUNDS):
        for _ in range(OPERATIONS):
            both.step()
        both.kill()
    assert leaks(node) == []
    node.down()
    done = run_kvfs("fsck", "--store", str(node.store), "--checksums")
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(model)
