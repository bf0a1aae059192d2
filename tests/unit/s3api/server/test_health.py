"""What probes of the admin port are told of NFS."""

import time
from typing import Any, cast

import pytest
import trio

from kvfs.http.api import Head, RequestBody
from s3api.server.admin_port import Admin

FINE = {"engine": {"journal_failure": None}, "mount": None}
SERVED = {"is_serving": True, "problem": "", "exports": []}
ENDED = {"is_serving": False, "problem": "it ended", "exports": []}
LEFT_OUT = SERVED | {"exports": [{"namespace": "cache", "problem": "it is wrong"}]}


def told(
    path: bytes, nfs: dict[str, Any] | None, s3: dict[str, Any] | None = None
) -> tuple[int, str]:
    async def status() -> dict[str, Any]:
        return FINE | {"nfs": nfs, "s3": s3}

    async def ask() -> tuple[int, str]:
        head = Head("GET", path, [], {}, None, False, True, False, False, ("", 0), False)
        answer = await Admin(status, None).handle(head, cast("RequestBody", None))
        assert isinstance(answer.body, bytes)
        return answer.status, answer.body.decode()

    return trio.run(ask)


@pytest.mark.parametrize(
    ("nfs", "of_nfs", "beside"),
    [
        (None, (404, "NFS is off\n"), ""),
        (SERVED, (200, "served\n"), ""),
        (ENDED, (503, "NFS is not served: it ended\n"), "NFS is not served: it ended\n"),
        (
            LEFT_OUT,
            (200, "served\n/cache is not served by NFS: it is wrong\n"),
            "/cache is not served by NFS: it is wrong\n",
        ),
    ],
)
def test_a_node_is_ready_while_nfs_is_not_and_says_so(
    nfs: dict[str, Any] | None, of_nfs: tuple[int, str], beside: str
) -> None:
    assert told(b"/health/nfs", nfs) == of_nfs
    assert told(b"/health/ready", nfs) == (200, f"ready\n{beside}")


@pytest.mark.parametrize(
    ("days", "beside"),
    [
        (40.0, ""),
        (29.6, "S3: the certificate expires in 30 days\n"),
        (-1.0, "S3: the certificate has expired\n"),
    ],
)
def test_the_end_of_a_certificate_is_told_long_before(days: float, beside: str) -> None:
    s3 = {
        "certificate_expires_s": time.time() + days * 86400,
        "answering_workers": 1,
        "wanted_workers": 1,
    }
    assert told(b"/health/ready", None, s3) == (200, f"ready\n{beside}")
