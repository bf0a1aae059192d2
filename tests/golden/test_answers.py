"""What commands answer with `--json`, and a node at /metrics: names and types. Each command that
has the option is asked, or named here with the reason why not."""

import json
import os
import shutil
import struct
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.root import group, run
from kvfs.base import control
from kvfs.base.errors import NotSupported
from s3api.server import metrics
from tests.cluster.waiting import wait_until
from tests.golden import shapes
from tests.golden.conftest import VERSION, Running
from tests.golden.golden import hold
from tests.golden.stores import contents
from tests.golden.stores.make import unpack

_BLOCK: Final = "/cache/block-1"
_MODEL: Final = "models/tiny.safetensors"
RUNNING: Final = (
    *("status", "doctor", "ls /models", f"stat {_BLOCK} /models /models/link", f"where {_BLOCK}"),
    *(f"backing {_BLOCK} --for 0", f"model inspect /{_MODEL} --ranks 2"),
    *("namespace list", "namespace show team", "nfs list", "config", "upgrade --check"),
    *("s3 user add new", "s3 user list", "s3 user rotate new"),
)
"""Of a lone node that runs; in this order."""
CLUSTER: Final = ("status", "node list", "node drain --status", f"where {_BLOCK}")
"""Of a cluster's."""
STOPPED: Final = ("fsck", "fsck --repair", "quarantine", "rebuild")
"""Of a store that no node uses."""
BACKUPS: Final = ("backup create", "backup list", "backup verify", "backup restore")
"""Of a place of backups; the last one makes a store."""
PLACES: Final = ("backup list", "backup verify")
"""Of these no store is named."""
NOT_ASKED: Final = {
    "model load": "it needs torch",
    "bench gds": "it needs torch",
    "nfs clients": "it needs NFS-Ganesha",
}
_OPAQUE: Final = ("[].policy", "settings", "origins")
"""Objects whose keys are others' names."""
Ask = Callable[[str, Path], list[Any]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs a command with `--json` on a store; what it printed, line by line."""
    for name in list(os.environ):
        if name.startswith("KVFS_") and not name.startswith("KVFS_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVFS_CONFIG", os.devnull)

    def asked(command: str, store: Path) -> list[Any]:
        capsys.readouterr()
        found_problems = command == "fsck"
        where = [] if command in PLACES else ["--store", str(store)]
        assert _code([*command.split(), "--json", *where]) == found_problems
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return asked


def test_every_command_is_asked() -> None:
    asked = [*RUNNING, *CLUSTER, *STOPPED, *BACKUPS]
    missing = [
        command
        for command in _commands(group, click.Context(group))
        if command not in NOT_ASKED
        and not any(f"{each} ".startswith(f"{command} ") for each in asked)
    ]
    assert missing == []


def test_answers(
    lone: Running, cluster: Running, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFS_BACKUP", str(tmp_path / "backups"))
    (lone.node.mount / _MODEL).write_bytes(_safetensors())
    assert run(["nfs", "export", "team", "--store", str(lone.node.store)]) == 0
    stopped = _with_stray(tmp_path)

    def answers() -> Iterator[str]:
        for command in RUNNING:
            yield from _shape(command, ask(command, lone.node.store))
        for command in CLUSTER:
            yield from _shape(f"{command}, in a cluster", ask(command, cluster.node.store))
        for command in BACKUPS:
            is_last = command == BACKUPS[-1]
            yield from _shape(
                command, ask(command, tmp_path / "new" if is_last else lone.node.store)
            )
        for command in STOPPED:
            if command == "rebuild":
                shutil.rmtree(stopped / "meta")
            yield from _shape(command, ask(command, stopped))

    hold("answers.txt", answers())


def test_methods(lone: Running, cluster: Running) -> None:
    """What nodes are asked over the control socket."""
    alone, in_cluster = _methods(lone), _methods(cluster)
    assert set(alone) < set(in_cluster)
    lines = [f"{each}{'' if each in alone else '  in a cluster'}" for each in in_cluster]
    hold("methods.txt", lines)


def test_metrics(lone: Running, cluster: Running) -> None:
    """Names, types, labels and help."""
    _be_counted(lone)
    alone = _families(_page(lone))
    in_cluster = _families(_page(cluster))
    with_nfs = _families(_page_with_more(lone))
    lines = [
        *alone.values(),
        *("", "In a cluster too:"),
        *(line for name, line in in_cluster.items() if name not in alone),
        *("", "Where NFS is on too:"),
        *(line for name, line in with_nfs.items() if name not in alone),
    ]
    hold("metrics.txt", lines)


def _code(arguments: list[str]) -> int:
    try:
        return run(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def _commands(command: click.Command, context: click.Context, path: str = "") -> Iterator[str]:
    """All that have the option."""
    if any("--json" in parameter.opts for parameter in command.params):
        yield path
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _commands(below, context, f"{path} {name}".strip())


def _shape(command: str, answers: list[Any]) -> Iterator[str]:
    assert answers, command
    yield f"kvfs {command}: {'one object' if len(answers) == 1 else 'an object on each line'}"
    yield from shapes.lines(answers, _OPAQUE)


def _with_stray(home: Path) -> Path:
    """A store that a killed node left, with a data file that no record names."""
    unpack(f"{VERSION}-lone-killed", home)
    data = home / "store" / "data" / "000"
    shutil.copy(data / "0002000000000003.0", data / "0002000000000300.0")
    return home / "store"


def _safetensors() -> bytes:
    """A tensor of 2 x 2."""
    tensor = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    head = json.dumps({"__metadata__": {"format": "pt"}, "a.weight": tensor}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(16)


def _be_counted(lone: Running) -> None:
    """A request that is answered, and one that is an error."""
    client = lone.s3.client("main")
    client.head_bucket(Bucket=contents.BUCKET)
    with pytest.raises(client.exceptions.NoSuchKey):
        client.get_object(Bucket=contents.BUCKET, Key="absent")
    wait_until(lambda: "kvfs_s3_errors_total{" in _page(lone), "the error was counted")


def _page(running: Running) -> str:
    with urllib.request.urlopen(f"{running.s3.admin_endpoint}/metrics", timeout=30) as answer:
        found: bytes = answer.read()
    return found.decode()


def _page_with_more(running: Running) -> str:
    """As of a node whose NFS is served, and that makes backups."""
    status = running.node.status()
    status["nfs"] = {"is_serving": True, "exports": [], "clients": 0, "connections": 0} | {
        "restarts": 0
    }
    status["backup"] = {"last": None, "problem": None}
    return metrics.exposition(status, None).decode()


def _methods(running: Running) -> list[str]:
    with pytest.raises(NotSupported) as refused:
        control.call(running.node.store / "run" / "control.sock", "nonsense")
    return str(refused.value).partition("there are: ")[2].split(", ")


def _families(page: str) -> dict[str, str]:
    """By name."""
    found = {}
    for family in text_string_to_metric_families(page):
        labels = ", ".join(sorted({label for each in family.samples for label in each.labels}))
        found[family.name] = f"{family.name}  {family.type}  {{{labels}}}  {family.documentation}"
    return found
