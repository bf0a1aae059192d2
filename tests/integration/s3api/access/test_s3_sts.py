"""Temporary keys from STS, with boto3's own client."""

import hashlib
import json
import time
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from kvfs.base.encryption import KEY_NAME, open_key
from s3api.auth.credentials import start_session
from tests.integration.s3 import REGION, S3, refused

ROLE = {"RoleArn": "arn:aws:iam::000000000000:role/job", "RoleSessionName": "job-1"}


def temporary(s3: S3, credentials: dict[str, Any], service: str = "s3") -> Any:
    """A client with temporary keys."""
    return boto3.session.Session().client(
        service,
        endpoint_url=s3.endpoint,
        region_name=REGION,
        aws_access_key_id=credentials["AccessKeyId"],
        aws_secret_access_key=credentials["SecretAccessKey"],
        aws_session_token=credentials["SessionToken"],
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )


def test_temporary_keys_act_as_their_user(s3: S3, bucket: str) -> None:
    answer = s3.client("main", "sts").assume_role(**ROLE)
    assert answer["AssumedRoleUser"]["Arn"] == "arn:aws:sts:::assumed-role/main/job-1"
    left = (answer["Credentials"]["Expiration"] - datetime.now(UTC)).total_seconds()
    assert 3500 < left <= 3600
    client = temporary(s3, answer["Credentials"])
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"x"
    made = f"made-by-a-session-{time.time_ns()}"
    client.create_bucket(Bucket=made)
    assert s3.client().get_bucket_acl(Bucket=made)["Owner"]["ID"] == "main"
    s3.remove_bucket(made)
    url = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "a"})
    assert "oken=" in url


def test_a_session_policy_restricts(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="in/a", Body=b"x")
    client.put_object(Bucket=bucket, Key="out/a", Body=b"x")
    statement = {
        "Effect": "Allow",
        "Action": "s3:GetObject",
        "Resource": f"arn:aws:s3:::{bucket}/in/*",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    for user in ("main", "admin", "alt"):
        answer = s3.client(user, "sts").assume_role(Policy=policy, DurationSeconds=900, **ROLE)
        job = temporary(s3, answer["Credentials"])
        if user == "alt":  # who may not himself gets nothing by it
            with refused(403, "AccessDenied"):
                job.get_object(Bucket=bucket, Key="in/a")
            continue
        job.get_object(Bucket=bucket, Key="in/a")
        for key in ("out/a", "in/none"):
            with refused(403, "AccessDenied"):
                job.get_object(Bucket=bucket, Key=key)
        with refused(403, "AccessDenied"):
            job.put_object(Bucket=bucket, Key="in/a", Body=b"y")
        with refused(403, "AccessDenied"):
            job.list_objects_v2(Bucket=bucket)
        with refused(403, "AccessDenied"):
            job.list_buckets()


def test_who_one_is(s3: S3) -> None:
    found = s3.client("alt", "sts").get_caller_identity()
    assert (found["UserId"], found["Arn"]) == ("alt", "arn:aws:iam:::user/alt")
    token = s3.client("alt", "sts").get_session_token()["Credentials"]
    found = temporary(s3, token, "sts").get_caller_identity()
    assert found["UserId"] == "alt"


def test_temporary_keys_get_no_others(s3: S3) -> None:
    token = s3.client("main", "sts").get_session_token()["Credentials"]
    with refused(403, "AccessDenied"):
        temporary(s3, token, "sts").assume_role(**ROLE)
    with refused(403, "AccessDenied"):
        temporary(s3, token, "sts").get_session_token()


def test_tokens_that_are_none(s3: S3, bucket: str) -> None:
    made = s3.client("main", "sts").get_session_token()["Credentials"]
    for token in ("", "no token", made["SessionToken"][:-8] + "AAAAAAA="):
        client = temporary(s3, made | {"SessionToken": token})
        with pytest.raises(client.exceptions.ClientError) as told:
            client.list_objects_v2(Bucket=bucket)
        assert told.value.response["Error"]["Code"] in ("InvalidToken", "InvalidAccessKeyId")


def test_keys_whose_time_is_over(s3: S3, bucket: str) -> None:
    key, parent = open_key(s3.node.store / KEY_NAME), s3.users["main"].access_key
    past = start_session(key, parent, now=time.time() - 901, duration_s=900)
    made = {
        "AccessKeyId": past.access_key,
        "SecretAccessKey": past.secret,
        "SessionToken": past.session_token,
    }
    with refused(400, "ExpiredToken"):
        temporary(s3, made).list_objects_v2(Bucket=bucket)
    with refused(400, "ExpiredTokenException"):
        temporary(s3, made, "sts").get_caller_identity()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"DurationSeconds": 1}, "ValidationError"),
        ({"DurationSeconds": 10**6}, "ValidationError"),
        ({"RoleSessionName": "a b"}, "ValidationError"),
        ({"RoleArn": "not-an-arn-but-long-enough"}, "ValidationError"),
        ({"Policy": "{}"}, "MalformedPolicyDocument"),
        ({"Tags": [{"Key": "a", "Value": "b"}]}, "ValidationError"),
        ({"Policy": json.dumps({"Version": "2012-10-17", "a": "b" * 3000})}, None),
    ],
)
def test_roles_that_are_not_given(s3: S3, wrong: dict[str, Any], code: str | None) -> None:
    client = s3.client("main", "sts", parameter_validation=False)
    with pytest.raises(client.exceptions.ClientError) as told:
        client.assume_role(**(ROLE | wrong))
    error = told.value.response["Error"]
    assert told.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    assert code is None or error["Code"] == code


def test_wrong_keys_and_unknown_actions(s3: S3) -> None:
    good = s3.users["main"]
    for access_key, secret, status, code in (
        (good.access_key, "wrong", 403, "SignatureDoesNotMatch"),
        ("NOSUCHKEY", "wrong", 403, "InvalidClientTokenId"),
    ):
        client = boto3.session.Session().client(
            "sts",
            endpoint_url=s3.endpoint,
            region_name=REGION,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret,
            config=Config(retries={"total_max_attempts": 1}),
        )
        with refused(status, code):
            client.get_caller_identity()
    with refused(400, "InvalidAction"):
        s3.client("main", "sts").get_federation_token(Name="somebody")


def test_what_is_not_signed_is_told_so(s3: S3) -> None:
    body = b"Action=GetCallerIdentity&Version=2011-06-15"
    answer = s3.exchange(
        b"POST / HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/x-www-form-urlencoded\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"<Code>MissingAuthenticationToken</Code>" in answer


@pytest.mark.parametrize("payload", ["digest of another body", "UNSIGNED-PAYLOAD"])
def test_the_signature_covers_the_form(s3: S3, payload: str) -> None:
    """Who overhears a harmless request may not send another form under its signature."""
    harmless = b"Action=GetCallerIdentity&Version=2011-06-15"
    form = b"Action=GetSessionToken&Version=2011-06-15"
    request = AWSRequest(
        "POST",
        s3.endpoint + "/",
        {"Content-Type": "application/x-www-form-urlencoded"},
        harmless,
    )
    is_digest = payload.startswith("digest")
    request.headers["x-amz-content-sha256"] = (
        hashlib.sha256(harmless).hexdigest() if is_digest else payload
    )
    pair = s3.users["main"]
    SigV4Auth(Credentials(pair.access_key, pair.secret), "sts", REGION).add_auth(request)
    fields = {"Host": f"{s3.host}:{s3.port}", **dict(request.headers.items())}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    answer = s3.exchange(
        b"POST / HTTP/1.1\r\n%bContent-Length: %d\r\nConnection: close\r\n\r\n%b"
        % (head.encode(), len(form), form)
    )
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"<Code>SignatureDoesNotMatch</Code>" in answer


def test_a_signature_of_one_service_is_none_of_the_other(s3: S3, bucket: str) -> None:
    """The scope of a signature names its service."""
    client = s3.client("main")

    def sign_for(service: str) -> Any:
        def change(context: dict[str, Any], **_: Any) -> None:
            context["signing"] = context.get("signing", {}) | {"signing_name": service}

        return change

    other = s3.client("main", "s3", connect_timeout=31)  # a client of its own
    other.meta.events.register("choose-signer.s3", sign_for("sts"))
    with refused(400, "AuthorizationHeaderMalformed"):
        other.list_objects_v2(Bucket=bucket)
    sts = s3.client("main", "sts", connect_timeout=31)
    sts.meta.events.register("choose-signer.sts", sign_for("s3"))
    with pytest.raises(sts.exceptions.ClientError):
        sts.get_caller_identity()
    client.list_objects_v2(Bucket=bucket)
