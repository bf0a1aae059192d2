"""Certificates of nodes, as OpenSSL reads them."""

import subprocess
import time
from pathlib import Path

import pytest

from kvfs.cluster import secrets
from kvfs.cluster.tls.certificates import AFTER_S, Authority
from kvfs.http.api import expires_s

SECRET = secrets.generate("00112233445566ff")


def openssl(*arguments: str | Path) -> str:
    return subprocess.run(
        ["openssl", *map(str, arguments)], check=True, capture_output=True, text=True
    ).stdout


def test_each_node_finds_the_same_authority() -> None:
    assert Authority(SECRET).certificate == Authority(SECRET).certificate
    assert Authority(SECRET).certificate != Authority(secrets.generate(SECRET.cluster)).certificate


@pytest.mark.parametrize("year", [1971, 2026, 2049, 2050, 2100])
def test_a_certificate_is_one_by_the_letter(tmp_path: Path, year: int) -> None:
    now_s = max(0, (year - 1970) * 31_556_952)
    authority, node = tmp_path / "authority", tmp_path / "node"
    authority.write_bytes(Authority(SECRET).certificate)
    issued = Authority(SECRET).issue("node 3", now_s)
    node.write_bytes(issued.certificate + issued.key)
    for purpose in ("sslserver", "sslclient"):
        when = ("-x509_strict", "-attime", str(now_s), "-purpose", purpose)
        assert "OK" in openssl("verify", *when, "-CAfile", authority, node)
    assert "node 3" in openssl("x509", "-in", node, "-noout", "-subject")
    public = openssl("x509", "-in", node, "-noout", "-pubkey")
    assert public == openssl("pkey", "-in", node, "-pubout")
    assert expires_s(node) == issued.expires_s == now_s + AFTER_S


def test_a_certificate_of_another_secret_is_not_taken(tmp_path: Path) -> None:
    authority, node = tmp_path / "authority", tmp_path / "node"
    authority.write_bytes(Authority(SECRET).certificate)
    other = Authority(secrets.generate(SECRET.cluster))
    node.write_bytes(other.issue("node 3", time.time()).certificate)
    with pytest.raises(subprocess.CalledProcessError):
        openssl("verify", "-CAfile", authority, node)


def test_nothing_shows_a_key() -> None:
    authority = Authority(SECRET)
    assert repr(authority) == "Authority(...)"
    assert "KEY" not in repr(authority.issue("node 3", 0.0))
