"""The store's key for secrets: made once, private, and refused where it was tampered with."""

import os
import threading
from pathlib import Path

import pytest

from kvfs.base.encryption import KEY_SIZE, SecretKey, open_key
from kvfs.base.errors import Corrupt, Invalid


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "secrets.key"
    encrypted = open_key(path).encrypt(b"plain", b"context")
    assert b"plain" not in encrypted
    assert open_key(path).decrypt(encrypted, b"context") == b"plain"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["secrets.key"]


def test_of_many_that_make_it_one_wins(tmp_path: Path) -> None:
    path, found = tmp_path / "secrets.key", list[SecretKey]()
    threads = [threading.Thread(target=lambda: found.append(open_key(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    encrypted = found[0].encrypt(b"plain", b"")
    assert [key.decrypt(encrypted, b"") for key in found] == [b"plain"] * 8
    assert len(list(tmp_path.iterdir())) == 1


def test_what_was_changed_is_not_decrypted() -> None:
    key = SecretKey(os.urandom(KEY_SIZE))
    encrypted = key.encrypt(b"plain", b"context")
    changed = bytes([encrypted[-1] ^ 1])
    for text, context in (
        (encrypted[:-1] + changed, b"context"),
        (encrypted, b"other"),
        (encrypted[:-1], b"context"),
        (encrypted[:5], b"context"),
        (b"", b"context"),
    ):
        with pytest.raises(Corrupt):
            key.decrypt(text, context)
    with pytest.raises(Corrupt):
        SecretKey(os.urandom(KEY_SIZE)).decrypt(encrypted, b"context")


def test_each_time_it_is_encrypted_differently() -> None:
    key = SecretKey(os.urandom(KEY_SIZE))
    assert key.encrypt(b"plain", b"") != key.encrypt(b"plain", b"")


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secrets.key"
    open_key(path)
    path.chmod(0o640)
    with pytest.raises(Invalid, match="chmod 600"):
        open_key(path)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_file_that_holds_no_key(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secrets.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(Corrupt):
        open_key(path)
