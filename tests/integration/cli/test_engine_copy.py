"""`kvfs engine copy` between stores and a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.datastore import layout
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from tests.contract.redis_servers import RedisServer, killed, on_a_port
from tests.contract.small_node import small_node
from tests.integration.harness import kvfs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(on_a_port(tmp_path_factory.mktemp("redis"))) as server:
        server.call("CONFIG", "SET", "requirepass", "secret")
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """With two namespaces and a file in each; its node is down."""
    path = tmp_path / "store"
    with small_node(path) as node:
        for name in ("cache", "models"):
            node.write(node.namespace(name), "file", b"data")
    return path


def everything(path: Path) -> list[tuple[bytes, bytes]]:
    engine = EmbeddedEngine(path / "meta")
    try:
        return engine.read_now(lambda t: list(t.scan(b"", b"\xff")))
    finally:
        engine.close()


def test_a_store_goes_to_a_server_and_comes_back(
    store: Path, server: RedisServer, tmp_path: Path
) -> None:
    url = f"redis://:secret@127.0.0.1:{server.port}?prefix=whole"
    out = kvfs("engine", "copy", str(store), url)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("copied ")
    back = kvfs("engine", "copy", url, str(tmp_path / "back"))
    assert back.stdout == out.stdout
    assert everything(tmp_path / "back") == everything(store)


def test_one_namespace(store: Path, server: RedisServer, tmp_path: Path) -> None:
    url = f"redis://:secret@127.0.0.1:{server.port}?prefix=one"
    assert kvfs("engine", "copy", str(store), url, "--namespace", "cache").returncode == 0
    assert kvfs("engine", "copy", url, str(tmp_path / "back")).returncode == 0
    listed = kvfs("namespace", "list", "--store", str(tmp_path / "back"))
    assert "cache" in listed.stdout
    assert "models" not in listed.stdout


def test_mistakes_are_named_and_passwords_are_not(
    store: Path, server: RedisServer, tmp_path: Path
) -> None:
    url = f"redis://:secret@127.0.0.1:{server.port}?prefix=mistakes"
    assert kvfs("engine", "copy", str(store), url).returncode == 0
    for arguments, code, words in [
        ((str(store), url), 4, "--replace"),
        ((str(store), str(store)), 2, "the same"),
        ((url, url.replace("127.0.0.1", "localhost"), "--replace"), 2, "the same"),
        ((str(tmp_path / "none"), url), 3, "none"),
        ((url.replace("secret", "wrong-one"), str(tmp_path / "t")), 2, "user and password"),
        ((str(store), "http://host"), 2, "redis://"),
        ((str(store), "redis://:hidden@host:port"), 2, "no number of a port"),
        ((str(store), f"{url}x", "--namespace", "none"), 3, "no namespace none"),
    ]:
        done = kvfs("engine", "copy", *arguments)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not any(word in done.stderr for word in ("secret", "wrong-one", "hidden"))


def test_a_password_may_be_in_a_file(store: Path, server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    url = f"redis://127.0.0.1:{server.port}?prefix=file&password-file={file}"
    done = kvfs("engine", "copy", str(store), url)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"the password file {file} cannot be read" in done.stderr
    file.write_text("secret\n")
    assert kvfs("engine", "copy", str(store), url).returncode == 0


def test_a_running_node_is_left_alone(store: Path, server: RedisServer) -> None:
    held = layout.open_store(store)
    held.lock()
    try:
        url = f"redis://:secret@127.0.0.1:{server.port}?prefix=busy"
        for arguments in ((str(store), url), (url, str(store))):
            done = kvfs("engine", "copy", *arguments)
            assert done.returncode == 4, done.stderr
    finally:
        held.unlock()
