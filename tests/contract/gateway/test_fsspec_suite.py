"""fsspec's own tests of a filesystem, on `kvfs://` beside a running node."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.tests import abstract

from gateway.fsspec.filesystem import KvfsFileSystem
from tests.contract import client_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("fsspec") / "store"
    with client_store.sound(root, beside_node=True):
        yield root


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, store: Path) -> Iterator[KvfsFileSystem]:
        fs = KvfsFileSystem(str(store), skip_instance_cache=True)
        yield fs
        fs.close()

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return f"/models/{tmp_path.name}"


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass
