"""Lines of `kvfs doctor` on TLS, about nodes of this version and the one before."""

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
