"""What probes of the admin port are told of NFS."""

from typing import Any, cast

import pytest
import trio

from kvfs.http.api import Head, RequestBody
from s3api.server.admin_port import Admin

FINE = {"engine": {"journal_failure": None}, "mount": None}
SERVED = {"is_serving": True, "problem": "", "exports": []}
ENDED = {"is_serving": False, "problem": "it ended", "exports": []}
LEFT_OUT = SERVED | {"exports": [{"namespace": "cache", "problem": "it is wrong"}]}


def told(path: bytes, nfs: dict[str, Any] | None) -> tuple[int, str]:
    async def status() -> dict[str, Any]:
        return FINE if nfs is None else FINE | {"nfs": nfs}

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
