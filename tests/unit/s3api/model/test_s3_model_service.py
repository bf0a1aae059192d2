"""The model is there, read without botocore's machinery, and what is compiled from it is whole."""

import subprocess
import sys

from s3api.http.s3_errors import DECLARATION
from s3api.model.parsing import parser
from s3api.model.serialising import root_of, serialise, serialiser
from s3api.model.service_model import service


def test_botocore_is_not_imported() -> None:
    script = (
        "import sys; from s3api.model import parsing; parsing.parser('GetObject');"
        "sys.exit(any(name.split('.')[0] == 'botocore' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_operation_has_a_parser_and_a_serialiser() -> None:
    for name, found in service().operations.items():
        assert parser(name).operation == name
        assert serialiser(name).status == found.status
        assert found.scope != "other" or not found.served


def test_roots_are_those_of_s3() -> None:
    assert root_of("ListBuckets") == "ListAllMyBucketsResult"
    assert root_of("GetBucketAcl") == "AccessControlPolicy"
    assert root_of("GetObjectTagging") == "Tagging"
    assert root_of("GetBucketVersioning") == "VersioningConfiguration"
    assert root_of("UploadPartCopy") == "CopyPartResult"
    assert root_of("GetObjectRetention") == "Retention"


def test_an_answer_that_may_begin_early() -> None:
    status, headers, body = serialise("CompleteMultipartUpload", {"Key": "k", "VersionId": "7"})
    assert status == 200
    assert headers == [(b"x-amz-version-id", b"7"), (b"content-type", b"application/xml")]
    assert body.startswith(DECLARATION + b"<CompleteMultipartUploadResult xmlns=")


def test_a_range_is_partial_content_and_a_policy_json() -> None:
    ranged = {"ContentRange": "bytes 0-1/9", "ContentLength": 2}
    assert serialise("GetObject", ranged)[0] == 206
    assert serialise("DeleteObject", {}) == (204, [], b"")
    policy = (200, [(b"content-type", b"application/json")], b"{}")
    assert serialise("GetBucketPolicy", {"Policy": "{}"}) == policy
