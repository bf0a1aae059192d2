"""What a store of a cold tier answers, of which not every one does all that S3 does."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from kvfs.base.errors import NotSupported
from kvfs.transfer.cold.endpoint import Endpoint

_BEGUN: Final = datetime(2026, 3, 1, tzinfo=UTC)
_PAGES: Final[list[dict[str, Any]]] = [
    {
        "IsTruncated": True,
        "NextKeyMarker": "tier/a",
        "NextUploadIdMarker": "1",
        "Uploads": [{"Key": "tier/a", "UploadId": "1", "Initiated": _BEGUN}],
    },
    {"Uploads": [{"Key": "tier/b", "UploadId": "2", "Initiated": _BEGUN + timedelta(hours=1)}]},
]


class Client:
    """Lists unfinished uploads in pages, which lack something."""

    def __init__(self, lacks: str = "") -> None:
        self._lacks = lacks

    def list_multipart_uploads(self, **asked: str) -> dict[str, Any]:
        page = dict(_PAGES[asked.get("UploadIdMarker") == "1"])
        page["Uploads"] = [self._without(each) for each in page["Uploads"]]
        headers = self._without({"date": "Sun, 01 Mar 2026 02:00:00 GMT"})
        return self._without(page) | {"ResponseMetadata": {"HTTPHeaders": headers}}

    def _without(self, told: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in told.items() if name != self._lacks}


def endpoint(client: Client) -> Endpoint:
    made = Endpoint.__new__(Endpoint)
    made.bucket, made._client = "bucket", client
    return made


def test_unfinished_uploads_of_all_pages_have_their_age_by_the_store_s_clock() -> None:
    found = [each[1:] for each in endpoint(Client()).unfinished("tier/")]
    assert found == [("1", 7200.0), ("2", 3600.0)]


@pytest.mark.parametrize("lacks", ["date", "Initiated", "NextUploadIdMarker"])
def test_a_store_that_does_not_tell_their_age_is_an_error_that_says_what_to_do(lacks: str) -> None:
    with pytest.raises(NotSupported, match=f"without '{lacks}': have a rule of the bucket"):
        list(endpoint(Client(lacks)).unfinished("tier/"))
