"""Loads by a user who is neither root nor the node's: through the mount, which is all that he may
enter; what needs the store says so."""

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Final

import pytest

from tests.gds import children, strangers
from tests.gds.checkpoints import llama, meant, write, write_shards
from tests.gds.command import with_torch
from tests.integration.harness import Node, best_mode
from tests.integration.posix import ALICE

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch
MIB: Final = 1 << 20
SHARDS: Final = [llama(2, 256), llama(2, 256, first=2)]
TENSORS: Final = SHARDS[0] | SHARDS[1]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node.make(best_mode())
    try:
        node.up()
        home = node.mount / "models" / "llama"
        home.mkdir()
        write_shards(home, SHARDS)
        for path in (home.parent, home, *home.iterdir()):
            path.chmod(path.stat().st_mode | 0o555)
        (node.mount / "cache" / "block").write_bytes(b"x" * 1000)
        yield node
    finally:
        node.remove()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return strangers.inside(tmp_path_factory.mktemp("other"))


_LOADED: Final = """
import gds, hashlib, os, torch
home = sys.argv[1]
files = [f"{home}/{name}" for name in sorted(os.listdir(home)) if name.endswith("safetensors")]
assert os.getuid() and not os.access(sys.argv[2], os.X_OK)
opened = [gds.safe_open(file, framework="pt") for file in files]
for tensors in (
    gds.load_model(home),
    {name: tensor for file in files for name, tensor in gds.load_file(file).items()},
    {name: tensor for file in files for name, tensor in gds.load_file(file, copy=False).items()},
    dict(gds.iter_tensors(home)),
    {name: file.get_tensor(name) for file in opened for name in file.keys()},
):
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy())
    print(found.hexdigest())
"""


def test_what_the_mount_shows_is_loaded_by_every_way(node: Node, other: tuple[str, ...]) -> None:
    found = children.run(_LOADED, node.mount / "models" / "llama", node.store, inside=other)
    whole = b"".join(TENSORS[name].data for name in sorted(TENSORS))
    assert found.split() == [hashlib.sha256(whole).hexdigest()] * 5


_REFUSED: Final = """
import gds, kvfs
from kvfs.base.errors import AccessDenied
mount, store = sys.argv[1:]
def said(call):
    try:
        call()
    except AccessDenied as error:
        print(error)

said(lambda: gds.load_file(f"{mount}/models/llama/model-00001-of-00002.safetensors", verify=True))
said(lambda: gds.read_blocks(["/cache/block"], bytearray(1000), client=kvfs.Client(store)))
"""


def test_what_needs_the_store_says_so(node: Node, other: tuple[str, ...]) -> None:
    verified, blocks = children.run(_REFUSED, node.mount, node.store, inside=other).splitlines()
    assert re.search(rf"\.safetensors: its checksums are in {node.store}.*not enter", verified)
    assert f"the store {node.store} belongs to another user" in blocks


_WARM: Final = """
import gds, os
def read_bytes():
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
path = sys.argv[1]
gds.load_file(path)
before = read_bytes()
print(len(gds.load_file(path)), read_bytes() - before)
"""


def test_of_his_own_file_what_is_in_memory_is_not_read_again(
    node: Node, other: tuple[str, ...]
) -> None:
    """It is cached as the data file's, of which he is told nothing."""
    path = node.mount / "models" / "own.safetensors"
    write(path, {f"t{n}": meant("U8", (24 * MIB,), n) for n in range(2)})
    os.chown(path, ALICE, ALICE)
    count, read = map(int, children.run(_WARM, path, inside=other).split())
    assert count == 2
    assert read < path.stat().st_size / 2  # libraries are read too


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("model", "load", "{}", "--ranks", "2"), 0, "all in "),
        (("model", "inspect", "{}"), 0, "in 2 files: BF16"),
        (("model", "load", "{}", "--verify"), 5, "its checksums are in"),
        (("model", "prefetch", "{}"), 5, "belongs to another user"),
        (("backing", "{}/model-00001-of-00002.safetensors"), 5, "its data file is in"),
    ],
)
def test_commands_work_or_say_what_they_lack(
    node: Node, other: tuple[str, ...], words: tuple[str, ...], code: int, says: str
) -> None:
    home = str(node.mount / "models" / "llama")
    command, environment = with_torch(
        *(word.replace("{}", home) for word in words), "--store", str(node.store)
    )
    done = subprocess.run(
        [*other, *command],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    told = done.stderr if code else done.stdout
    assert says in told.splitlines()[-1]
