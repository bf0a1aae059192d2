"""A node whose engine wants TLS and a user with a password: it works with no more rights than
docs/cluster.md names, and the password is told nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.redis_servers import RedisServer, ask, on_a_port
from tests.integration.harness import ROOT, CannotStart, Node, best_mode, kvfs

PASSWORD = f"not-to-be-seen-{os.urandom(4).hex()}"
DOCUMENTED = ROOT / "docs" / "cluster.md"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    made = tmp_path / "ca.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", tmp_path / "key", "-out", made),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return made


def rights() -> list[str]:
    """The words that docs/cluster.md gives for a user of the engine."""
    [line] = [each for each in DOCUMENTED.read_text().splitlines() if "ACL SETUSER kvfs" in each]
    words = line.partition("ACL SETUSER ")[2].partition("#")[0].replace("'", "").split()
    return [f">{PASSWORD}" if each.startswith(">") else each for each in words]


def restricted(tmp_path: Path, certificate: Path) -> RedisServer:
    """A server that lets in, by TLS, a user with these rights alone."""
    server = on_a_port(
        tmp_path / "engine",
        *("--appendonly", "yes", "--appendfsync", "no"),
        tls=(
            *("--tls-auth-clients", "no", "--tls-cert-file", str(certificate)),
            *("--tls-key-file", str(certificate.parent / "key")),
        ),
    )
    with server.connected() as connection:
        assert ask(connection, "ACL", "SETUSER", *rights()) == "OK"
        assert ask(connection, "ACL", "SETUSER", "default", "off") == "OK"
    return server


def told_to_all() -> str:
    """The arguments of all processes, as anybody may read them."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(each.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended
    return "\n".join(found)


def test_tls_and_a_user_with_a_password_which_nobody_sees(
    tmp_path: Path, certificate: Path
) -> None:
    server = restricted(tmp_path, certificate)
    place = f"127.0.0.1:{server.port}?ca={certificate}"
    url = f"rediss://kvfs:{PASSWORD}@{place}"
    node = Node.make(best_mode(), "--engine", url, "--peer", "127.0.0.1:0", "--s3", "127.0.0.1:0")
    # By the shell, not forked from a server of the tests: it has arguments of its own.
    node.inside = ("env", f"PATH={os.environ['PATH']}")
    try:
        node.up()
        (node.mount / "models" / "file").write_bytes(b"content")
        os.sync()
        assert (node.mount / "models" / "file").read_bytes() == b"content"
        for command in (("status",), ("status", "--json"), ("doctor",), ("fsck",)):
            told = kvfs(*command, "--store", str(node.store))
            assert PASSWORD not in told.stdout + told.stderr, command
        assert str(node.store) in told_to_all()
        assert PASSWORD not in told_to_all()
        for file in node.store.rglob("*"):
            assert not file.is_file() or PASSWORD.encode() not in file.read_bytes(), file
        node.down()
        file = tmp_path / "password"
        file.write_text("wrong")
        node.flags = ("--engine", f"rediss://kvfs@{place}&password-file={file}")
        with pytest.raises(CannotStart, match="password"):
            node.up()
        file.write_text(PASSWORD)
        node.up()
        assert (node.mount / "models" / "file").read_bytes() == b"content"
    finally:
        print(node.log[-5000:])
        node.remove()
        server.kill()


def test_a_password_is_written_over_in_the_arguments_alone() -> None:
    program = (
        "import sys; from cli.hidden_passwords import hide; hide(); print(sys.argv[1:]);"
        " print(open('/proc/self/cmdline').read())"
    )
    urls = [
        *(f"redis://u:{PASSWORD}@h:1/2", f"--engine=rediss://:{PASSWORD}@h", "redis://u@h:1"),
        *("redis+sentinel://h:1,h:2/n", f"REDIS://u:{PASSWORD}:{PASSWORD}@{PASSWORD}@h"),
    ]
    run = [sys.executable, "-c", program, *urls]
    told = subprocess.run(
        run, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ).stdout.splitlines()
    assert told[0] == str(urls)
    hidden = "x" * len(PASSWORD)
    shown = [each.replace(PASSWORD, hidden) for each in urls]
    shown[-1] = f"REDIS://u:{'x' * (3 * len(PASSWORD) + 2)}@h"
    assert told[1].split("\0")[-6:-1] == shown
