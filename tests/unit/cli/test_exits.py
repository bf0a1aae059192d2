import errno
import inspect
from pathlib import Path

import pytest

from cli.presentation import exits
from kvfs.base import errors

DOMAIN = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.KvfsError) and kind is not errors.KvfsError
]


@pytest.mark.parametrize("kind", DOMAIN)
def test_every_domain_error_has_an_exit_code(kind: type[errors.KvfsError]) -> None:
    assert kind in exits.EXIT_CODES
    assert f"  {exits.exit_code(kind('x'))} " in exits.HELP


def test_system_errors_have_codes_too() -> None:
    assert exits.exit_code(FileNotFoundError()) == 3
    assert exits.exit_code(IsADirectoryError()) == 4
    assert exits.exit_code(PermissionError()) == 5
    assert exits.exit_code(ZeroDivisionError()) == exits.BUG


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, 6),
        (errno.EDQUOT, 6),
        (errno.EROFS, 5),
        (errno.EIO, 8),
        (errno.ENOTCONN, 7),
    ],
)
def test_what_the_disk_says_has_the_code_of_the_table(number: int, code: int) -> None:
    assert exits.exit_code(OSError(number, "x")) == code


def test_a_message_is_one_line(tmp_path: Path) -> None:
    assert exits.describe(errors.NoSpace("the store\nis  full")) == "the store is full"
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "gone").read_bytes()
    assert exits.describe(caught.value) == f"{tmp_path / 'gone'}: No such file or directory"
