"""A node with a cold tier, whose daemon is killed: what it was fetching comes by the next one."""

import os
import threading
from collections.abc import Iterator

import pytest

from tests.integration.harness import kvfs
from tests.integration.s3 import S3
from tests.integration.s3api.objects.test_s3_cold import SIZE, Cold, new_cold
from tests.integration.takeover.successor import WAIT, kill


@pytest.fixture
def cold(s3: S3) -> Iterator[Cold]:
    with new_cold(s3, *WAIT, kinds=["durable"]) as made:
        yield made


def test_programs_go_on(cold: Cold) -> None:
    content = cold.content["cold-durable"]
    fetched, opened, cut, emptied = cold.away("cold-durable")[:4]
    here = next(path for path in content if not cold.is_away(path))
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fetched.read_bytes()))
    with (
        here.open("rb", buffering=0) as reading,
        opened.open("rb", buffering=0) as brought,
        cut.open("r+b", buffering=0) as changing,
        emptied.open("wb", buffering=0) as writing,
    ):
        cold.proxy.held = "out"
        reader.start()
        kill(cold.node)
        cold.proxy.held = None
        reader.join()
        changing.write(b"new")
        writing.write(b"all")
        assert brought.read(SIZE) == content[opened]
        assert reading.read(SIZE) == content[here]
        assert os.pread(changing.fileno(), SIZE, 0) == b"new" + content[cut][3:]
    assert got == [content[fetched]]
    content |= {cut: b"new" + content[cut][3:], emptied: b"all"}
    for path, data in content.items():
        assert path.read_bytes() == data
    kill(cold.node)
    cold.node.down()
    done = kvfs("fsck", "--store", str(cold.node.store))
    assert done.returncode == 0, done.stdout
