"""Serving S3: start and end, workers that die, ports, users, health, metrics, the access log."""

import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.commands.admin.s3_clients import CLIENTS
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, best_mode, kvfs, wait_for_exit
from tests.integration.s3 import S3, refused, serving, users_of

ADMIN = ("--admin", "127.0.0.1:0")


@pytest.fixture
def node() -> Iterator[Node]:
    """A store and a mountpoint; not started."""
    made = Node.make(best_mode(), "--s3", "127.0.0.1:0", *ADMIN)
    yield made
    print(made.log[-5000:])
    made.remove()


def up(node: Node, *flags: str) -> subprocess.CompletedProcess[str]:
    done = kvfs("up", "--daemon", *node.place(), "--mode", node.mode, *flags)
    if done.returncode == 0:
        node.pid = node.status()["pid"]
    return done


def fetch(url: str) -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# ---- start and end


def test_the_first_start_shows_the_key_pair_once(node: Node) -> None:
    first = up(node, "--s3", "127.0.0.1:0", *ADMIN)
    assert first.returncode == 0, first.stderr
    secret = re.search(r"^  secret      (\S{40})$", first.stdout, re.MULTILINE)
    assert secret is not None
    file = node.store / "s3-credentials"
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret[1] in file.read_text()
    assert secret[1] not in node.log
    assert secret[1] not in json.dumps(node.status())
    assert secret[1].encode() not in (node.store / "meta" / "data.mdb").read_bytes()
    node.down()
    again = up(node, "--s3", "127.0.0.1:0", *ADMIN)
    assert again.returncode == 0, again.stderr
    assert "  s3      http://127.0.0.1:" in again.stdout
    assert "secret" not in again.stdout
    with users_of(node) as users:
        assert users.find("admin").secret == secret[1]


def test_without_s3_there_is_neither_listener_nor_user(node: Node) -> None:
    done = up(node, "--no-s3")
    assert done.returncode == 0, done.stderr
    assert "s3 " not in done.stdout
    assert "s3" not in node.status()
    assert not (node.store / "s3-credentials").exists()
    refusal = kvfs("s3", "env", "--store", str(node.store))
    assert (refusal.returncode, refusal.stdout) == (3, "")
    assert "admin" in refusal.stderr


def test_the_admin_port_may_be_served_without_s3(node: Node) -> None:
    assert up(node, "--no-s3", *ADMIN).returncode == 0
    endpoint = node.status()["admin"]["endpoint"]
    assert fetch(f"{endpoint}/health/ready") == (200, "ready\n")
    assert "kvfs_s3" not in fetch(f"{endpoint}/metrics")[1]


def test_a_port_that_is_taken_is_named_with_the_remedy(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        for flags in (("--s3", where, *ADMIN), ("--s3", "127.0.0.1:0", "--admin", where)):
            done = up(node, *flags)
            assert done.returncode == 4
            *slow, told = done.stderr.splitlines()
            assert f"another program listens at {where}: choose another port" in told
            assert all("still starting" in line for line in slow)  # said by a start that takes long


def test_two_nodes_never_share_a_port(node: Node) -> None:
    with serving() as other:
        done = up(node, "--s3", f"127.0.0.1:{other.port}", *ADMIN)
        assert done.returncode == 4
        assert "another program listens" in done.stderr


def test_nodes_side_by_side_need_no_ports_of_their_own(node: Node) -> None:
    """Where nobody chose a port and the usual one is taken, any free one is served and told."""
    others = [Node.make(node.mode) for _ in range(2)]
    try:
        told = [up(each, "--s3", "auto", "--admin", "auto") for each in others]
        assert [done.returncode for done in told] == [0, 0], told
        endpoints = {each.status()["s3"]["endpoint"] for each in others}
        endpoints |= {each.status()["admin"]["endpoint"] for each in others}
        assert len(endpoints) == 4
        for each in others:
            env = kvfs("s3", "env", "--store", str(each.store)).stdout
            assert each.status()["s3"]["endpoint"] in env
    finally:
        for each in others:
            each.remove()


def test_senseless_settings_are_refused(node: Node) -> None:
    for flags, message in (
        (("--s3", "9000"), "must be HOST:PORT like '127.0.0.1:9000', 'auto' or 'off'"),
        (("--s3", "127.0.0.1:99999"), "99999 is no port"),
        (("--s3", "192.0.2.1:9000"), "192.0.2.1 is no address of this machine"),
        (("--s3-workers", "0"), "must be a number from 1 to 64"),
        (("--s3-certificate", "/x.pem"), "needs s3_private_key"),
        (("--s3-domains", "a b"), "must be names of hosts"),
        (("--s3-access-log", "/nowhere/at/all"), "No such file or directory"),
        (("--s3", "127.0.0.1:9000", "--no-s3"), "--no-s3 does not go with"),
    ):
        done = up(node, *("--s3", "127.0.0.1:0", *ADMIN, *flags))
        assert done.returncode in (2, 3), (flags, done.stdout)
        assert message in done.stderr


def test_requests_under_way_are_answered_before_the_end() -> None:
    with serving() as s3:
        client = s3.client("admin")
        body = os.urandom(32 << 20)
        client.put_object(Bucket="models", Key="big", Body=body)
        answer = client.get_object(Bucket="models", Key="big")["Body"]
        head = answer.read(1 << 20)
        assert s3.node.pid is not None
        os.kill(s3.node.pid, signal.SIGTERM)
        assert head + answer.read() == body
        wait_until(lambda: not Path(f"/proc/{s3.node.pid}").exists(), "the daemon has ended")
        assert "did not end" not in s3.node.log
        assert (s3.node.store / "clean").exists()


def test_workers_end_with_a_daemon_that_is_killed(node: Node) -> None:
    node.up()
    workers = node.status()["s3"]["workers"]
    watches = [os.pidfd_open(pid) for pid in workers]
    node.kill()
    for watch in watches:
        wait_for_exit(watch)
        os.close(watch)
    node.up()  # at its old ports or others: they are free
    assert len(node.status()["s3"]["workers"]) == len(workers)


# ---- workers


@pytest.mark.parametrize("said", [b"", b'{"store": "/nowhere", "list'])
def test_a_worker_whose_start_is_given_up_ends_without_a_word(said: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "s3api.server.worker"], input=said, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_dead_worker_is_replaced_and_no_connection_is_refused() -> None:
    with serving("--s3-workers", "2") as s3:
        client = s3.client("admin")
        client.list_buckets()
        before = s3.node.status()["s3"]
        assert len(before["workers"]) == before["wanted_workers"] == 2
        for pid in before["workers"]:
            os.kill(pid, signal.SIGKILL)
        with s3.connect() as peer:  # waits in the backlog until a successor takes it
            peer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert peer.recv(100).startswith(b"HTTP/1.1 ")

        def are_replaced() -> bool:
            workers = s3.node.status()["s3"]["workers"]
            return len(workers) == 2 and not set(workers) & set(before["workers"])

        wait_until(are_replaced, "both have successors")
        after = s3.node.status()["s3"]
        assert after["restarts"] == 2
        assert after["requests"] >= before["requests"]  # the dead one's count too
        client.list_buckets()
        assert s3.node.log.count("killed by signal 9") == 2


def test_a_mount_that_comes_and_goes_leaves_s3_alone() -> None:
    with serving("--no-mount") as s3:
        client = s3.client("admin")
        client.put_object(Bucket="models", Key="k", Body=b"1")
        store = ("--store", str(s3.node.store))
        assert kvfs("mount", str(s3.mount), *store).returncode == 0
        assert (s3.mount / "models" / "k").read_bytes() == b"1"
        client.put_object(Bucket="models", Key="k", Body=b"2")
        assert (s3.mount / "models" / "k").read_bytes() == b"2"
        assert kvfs("umount", *store).returncode == 0
        client.put_object(Bucket="models", Key="k", Body=b"3")
        assert client.get_object(Bucket="models", Key="k")["Body"].read() == b"3"


def test_tls_with_a_certificate(node: Node, tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    flags = ("--s3-certificate", str(certificate), "--s3-private-key", str(key))
    done = up(node, "--s3", "127.0.0.1:0", *ADMIN, flags[0], str(key), *flags[2:])
    assert done.returncode == 2
    assert "no certificate with its key" in done.stderr
    with serving(*flags) as s3:
        assert s3.endpoint.startswith("https://127.0.0.1:")
        url = kvfs("s3", "presign", "GET", "models", "--store", str(s3.node.store)).stdout.strip()
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(url, context=context, timeout=30) as answer:
            assert b"<Name>models</Name>" in answer.read()
        lines = json.loads(kvfs("doctor", "--json", "--store", str(s3.node.store)).stdout)["paths"]
        found = {line["name"]: line for line in lines}
        assert found["s3 TLS"]["active"]
        assert not found["s3 sendfile"]["active"]


# ---- users


def test_users_come_and_go_beside_a_running_node(s3: S3) -> None:
    store = ("--store", str(s3.node.store))

    def user(*arguments: str) -> str:
        done = kvfs("s3", "user", *arguments, *store)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = json.loads(user("add", "carol", "--json"))
    assert set(told) == {"user", "access_key", "secret"}
    listed = user("list")
    assert told["access_key"] in listed
    assert told["secret"] not in listed
    s3.users["carol"] = type(s3.users["main"])(told["access_key"], told["secret"])
    client = s3.client("carol")
    assert client.list_buckets()["Buckets"] == []

    user("disable", "carol")
    time.sleep(1.1)
    with refused(403, "InvalidAccessKeyId"):
        client.list_buckets()
    user("enable", "carol")
    time.sleep(1.1)
    client.list_buckets()
    again = json.loads(user("rotate", "carol", "--json"))
    assert again["secret"] != told["secret"]
    time.sleep(1.1)
    with refused(403, "InvalidAccessKeyId"):
        client.list_buckets()
    user("remove", "carol")
    assert "carol" not in user("list")
    done = kvfs("s3", "user", "rotate", "carol", *store)
    assert (done.returncode, done.stderr) == (3, "kvfs: there is no user 'carol'\n")
    done = kvfs("s3", "user", "add", "main", *store)
    assert done.returncode == 4


def test_a_users_policy_is_set_shown_and_checked(s3: S3, tmp_path: Path) -> None:
    store = ("--store", str(s3.node.store))
    document = tmp_path / "policy.json"
    document.write_text('{"Statement": [{"Effect": "Deny", "Action": "*", "Resource": "*"}]}')
    s3.add_user("dora")
    client = s3.client("dora")
    client.list_buckets()
    assert kvfs("s3", "user", "policy", "dora", str(document), *store).returncode == 0
    assert kvfs("s3", "user", "policy", "dora", *store).stdout.strip() == document.read_text()
    time.sleep(1.1)
    with refused(403, "AccessDenied"):
        client.list_buckets()
    assert kvfs("s3", "user", "policy", "dora", "--delete", *store).returncode == 0
    time.sleep(1.1)
    client.list_buckets()
    document.write_text('{"Statement": "x"}')
    done = kvfs("s3", "user", "policy", "dora", str(document), *store)
    assert done.returncode == 2
    assert "MalformedPolicy" in done.stderr


def test_users_are_managed_without_a_node(node: Node) -> None:
    node.up()
    node.down()
    store = ("--store", str(node.store))
    assert kvfs("s3", "user", "add", "eve", *store).returncode == 0
    assert "eve" in kvfs("s3", "user", "list", *store).stdout
    assert "http://127.0.0.1:9000" in kvfs("s3", "env", *store, "--s3", "auto").stdout
    done = kvfs("s3", "user", "rotate", "admin", *store)
    secret = done.stdout.split()[-1]
    assert secret in (node.store / "s3-credentials").read_text()


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_needs_names_endpoint_and_keys(s3: S3, client: str) -> None:
    done = kvfs("s3", "env", "--for", client, "--store", str(s3.node.store), "--user", "main")
    assert done.returncode == 0, done.stderr
    assert s3.users["main"].secret in done.stdout
    assert s3.users["main"].access_key in done.stdout
    assert str(s3.port) in done.stdout
    if client in ("boto3", "s3fs", "minio", "pyarrow"):
        compile(done.stdout, client, "exec")


def test_the_shell_variables_are_all_that_boto3_needs(s3: S3) -> None:
    env = kvfs("s3", "env", "--store", str(s3.node.store)).stdout
    script = "import boto3; print(boto3.client('s3').list_buckets()['Buckets'])"
    line = f"{env}\nexec {sys.executable} -W ignore -c {shlex.quote(script)}"
    done = subprocess.run(["sh", "-ec", line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'models'" in done.stdout


def test_presigned_urls_work_for_what_they_name_alone(s3: S3, bucket: str) -> None:
    def sign(*arguments: str) -> str:
        done = kvfs("s3", "presign", *arguments, "--store", str(s3.node.store))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    url = sign("PUT", f"{bucket}/a key+ü")
    request = urllib.request.Request(url, b"body", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    assert fetch(sign("GET", f"{bucket}/a key+ü")) == (200, "body")
    assert fetch(url)[0] == 403
    short = sign("GET", f"{bucket}/a key+ü", "--expires", "1")
    time.sleep(2.1)
    assert fetch(short)[0] == 403
    done = kvfs("s3", "presign", "FETCH", "a/b", "--store", str(s3.node.store))
    assert done.returncode == 2


# ---- health and metrics


def samples(endpoint: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    status, page = fetch(f"{endpoint}/metrics")
    assert status == 200
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for family in text_string_to_metric_families(page)
        for each in family.samples
    }


@pytest.fixture
def fresh() -> Iterator[S3]:
    """A server that has counted nothing: only so many buckets have counts of their own."""
    with serving() as server:
        yield server


def test_health_and_metrics(fresh: S3) -> None:
    endpoint, client, bucket = fresh.admin_endpoint, fresh.client("admin"), "models"
    assert fetch(f"{endpoint}/health/live") == (200, "alive\n")
    assert fetch(f"{endpoint}/health/ready") == (200, "ready\n")
    assert fetch(f"{endpoint}/else")[0] == 404
    client.put_object(Bucket=bucket, Key="k", Body=b"12345")
    for _ in range(3):
        client.get_object(Bucket=bucket, Key="k")["Body"].read()
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket=bucket, Key="no")
    with refused(404, "NoSuchBucket"):
        client.get_object(Bucket="never-seen-before", Key="no")
    found = samples(endpoint)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    get = {"operation": "GetObject", "bucket": bucket}
    assert value("kvfs_s3_requests_total", **get, status="200") == 3
    assert value("kvfs_s3_requests_total", **get, status="404") == 1
    assert value("kvfs_s3_errors_total", **get, code="NoSuchKey") == 1
    assert value("kvfs_s3_seconds_count", **get) == 4
    assert value("kvfs_s3_seconds_bucket", **get, le="+Inf") == 4
    assert value("kvfs_s3_sent_bytes_total", **get) > 15
    put = {"operation": "PutObject", "bucket": bucket}
    assert value("kvfs_s3_received_bytes_total", **put) >= 5
    assert value("kvfs_s3_workers") >= 1
    assert value("kvfs_s3_waiting_connections") == 0
    assert not any(("bucket", "never-seen-before") in labels for _, labels in found)
    assert value("kvfs_mounted") == 1
    assert value("kvfs_namespace_inodes", namespace=bucket) == 1


def test_a_worker_that_hangs_does_not_hold_the_probes_up() -> None:
    with serving("--s3-workers", "1") as s3:
        (worker,) = s3.node.status()["s3"]["workers"]

        def is_ready() -> bool:
            return fetch(f"{s3.admin_endpoint}/health/ready")[0] == 200

        os.kill(worker, signal.SIGSTOP)
        try:
            assert fetch(f"{s3.admin_endpoint}/health/live")[0] == 200
            ready = fetch(f"{s3.admin_endpoint}/health/ready")
            assert ready == (503, "not ready: 0 of 1 S3 workers answer\n")
        finally:
            os.kill(worker, signal.SIGCONT)
        wait_until(is_ready, "the worker answers")
        s3.client("admin").list_buckets()
        assert s3.node.status()["s3"]["requests"] == 1  # no answer is taken for another
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: s3.node.status()["s3"]["restarts"] == 1, "it has a successor")
        wait_until(is_ready, "the worker answers")


# ---- the access log


def test_the_access_log_has_a_line_for_each_request_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    with serving("--s3-access-log", str(path)) as s3:
        client = s3.client("admin")
        client.put_object(Bucket="models", Key="a b\n", Body=b"12345")
        client.get_object(Bucket="models", Key="a b\n", Range="bytes=1-2")["Body"].read()
        url = kvfs("s3", "presign", "GET", "models/none", "--store", str(s3.node.store))
        assert fetch(url.stdout.strip())[0] == 404
        wait_until(lambda: path.read_text().count("\n") == 3, "three lines")
        put, get, absent = path.read_text().splitlines()
        assert " models [" in put
        assert " admin " in put
        assert " REST.PUT.OBJECT a%20b%0A " in put
        # The body's bytes, the object's, both times.
        assert re.search(r'"GET /models/a%20b%0A HTTP/1.1" 206 - 2 5 \d+ \d+ "-" "Boto3', get)
        assert re.search(r'"PUT /models/a%20b%0A HTTP/1.1" 200 - - 5 \d+ \d+ ', put)
        assert put.startswith("admin models [")
        assert " SigV4 - AuthHeader " in get
        assert " 404 NoSuchKey " in absent
        assert "X-Amz-Signature=- " in absent
        assert " QueryString " in absent
        upload = client.create_multipart_upload(Bucket="models", Key="u")["UploadId"]
        parts = {"Bucket": "models", "Key": "u", "UploadId": upload}
        client.upload_part(PartNumber=1, Body=b"x", **parts)
        client.list_parts(**parts)
        client.abort_multipart_upload(**parts)
        client.get_bucket_versioning(Bucket="models")
        client.head_object(Bucket="models", Key="a b\n")
        wait_until(lambda: path.read_text().count("\n") == 9, "nine lines")
        told = [re.search(r" (REST\.\S+) ", line) for line in path.read_text().splitlines()[3:]]
        assert [each and each[1] for each in told] == [
            "REST.POST.UPLOADS",
            "REST.PUT.PART",
            "REST.GET.UPLOAD",
            "REST.DELETE.UPLOAD",
            "REST.GET.VERSIONING",
            "REST.HEAD.OBJECT",
        ]
        assert re.search(r'HTTP/1.1" 200 - - 5 \d+ \d+ ', path.read_text().splitlines()[-1])
        signature = url.stdout.strip().rpartition("X-Amz-Signature=")[2]
        assert signature not in path.read_text()
        forged = "models%0Aadmin%20models%20[01%2FJan%2F2026]%0D%22"
        s3.exchange(f"GET /{forged}/k HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        wait_until(lambda: "models%0A" in path.read_text(), "a line")
        assert path.read_text().count("\n") == 10
        last = path.read_text().splitlines()[-1]
        assert last.split(" ")[1] == "models%0Aadmin%20models%20[01/Jan/2026]%0D%22"
        path.rename(tmp_path / "old.log")
        time.sleep(1.1)
        client.list_buckets()
        wait_until(lambda: path.exists() and path.read_text().count("\n") == 1, "a new log")
