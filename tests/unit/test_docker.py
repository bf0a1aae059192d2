"""What the container files say of this project is so; Docker itself is not asked."""

import json
import re
from configparser import ConfigParser
from pathlib import Path

from cli.commands.service import up
from kvfs.base.config import load

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE = (ROOT / "docker-compose.yml").read_text()
NODES = [
    words
    for found in re.findall(r"^    command: (\[.*?\])$", COMPOSE, re.MULTILINE | re.DOTALL)
    if (words := json.loads(found))[0] == "up"
]


def test_the_image_has_all_packages_and_what_they_need() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = [line.split()[1:-1] for line in dockerfile.splitlines() if line.startswith("COPY ")]
    names = [name for names in copied for name in names]
    assert all((ROOT / name).exists() for name in names)
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert set(settings["importlinter"]["root_packages"].split()) <= set(names)
    assert "requirements.lock" in names


def test_each_node_is_started_with_settings_that_there_are() -> None:
    assert len(NODES) == 3
    for words in NODES:
        given = up.command.make_context("up", words[1:]).params
        flags = {name: value for name, value in given.items() if value not in (None, False)}
        config, _ = load({k: v for k, v in flags.items() if k != "config_file"}, environ={})
        assert config.s3 != "off"


def test_nodes_differ_where_they_must_and_nowhere_else() -> None:
    settings = [dict(zip(words[1::2], words[2::2], strict=True)) for words in NODES]
    own = ("--mount", "--node-name", "--advertise")
    for name in settings[0]:
        values = {each[name] for each in settings}
        assert len(values) == (3 if name in own else 1), name
    for each in settings:
        assert each["--advertise"] == f"{each['--node-name']}:{each['--peer'].rpartition(':')[2]}"
        assert f"\n  {each['--node-name']}:\n" in COMPOSE  # the name by which others reach it
        admin = each["--admin"].rpartition(":")[2]
        assert f'"{each["--node-name"]}:{admin}"' in COMPOSE  # Prometheus asks it
    assert "\n  engine:\n" in COMPOSE
    assert settings[0]["--engine"].startswith("redis://engine:")
