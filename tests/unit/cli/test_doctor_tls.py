"""Lines of `kvfs doctor` on TLS, about nodes of this version and the one before."""

from pathlib import Path
from typing import Any

import pytest

from cli.commands.service import doctor_tls

S3 = {"tls": True, "endpoint": "https://127.0.0.1:9000"}
BEFORE: dict[str, Any] = {"s3": S3, "cluster": {"node": 1, "nodes": [{"number": 1}]}}
OFF = {"mode": "off", "certificate_expires_s": None}
NOW: dict[str, Any] = {
    "s3": {**S3, "certificate_expires_s": 4e9},
    "cluster": {"node": 1, "nodes": [{"number": 1, "tls": False}], "tls": OFF},
}


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (None, {"s3 TLS": None}),
        (BEFORE, {"s3 TLS": True}),
        (NOW, {"s3 TLS": True, "TLS between nodes": False}),
    ],
    ids=["no node", "of the version before", "of this version"],
)
def test_what_a_node_does_not_tell_is_left_out(
    status: dict[str, Any] | None, told: dict[str, bool | None]
) -> None:
    """An upgrade has the program of the next version examine the node that still runs."""
    found = {each.name: each.active for each in doctor_tls.lines(status)}
    assert found.pop("kernel TLS") is False
    assert found == told


@pytest.mark.parametrize(
    ("loaded", "modules", "has"),
    [
        ("espintcp mptcp tls\n", None, True),
        ("mptcp\n", "kernel/net/tls/tls.ko.zst:\nkernel/net/mptcp/mptcp_diag.ko:\n", True),
        ("mptcp\n", "kernel/drivers/net/tls/tlsx.ko: kernel/net/tls/tls.ko\n", False),
        ("mptcp\n", None, False),
        (None, None, False),
    ],
)
def test_tls_of_the_kernel_is_found_without_a_socket(
    tmp_path: Path, loaded: str | None, modules: str | None, has: bool
) -> None:
    """A socket that asks has the kernel load the module."""
    protocols = tmp_path / "tcp_available_ulp"
    for path, text in ((protocols, loaded), (tmp_path / "modules.dep", modules)):
        if text is not None:
            path.write_text(text)
    assert doctor_tls.kernel_has_tls(protocols, tmp_path) is has
