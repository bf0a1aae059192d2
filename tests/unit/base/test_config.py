from pathlib import Path

import pytest

from kvfs.base import config as configuration
from kvfs.base.config import KEYS, Address, load
from kvfs.base.errors import ConfigError
from kvfs.base.units import Capacity


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "kvfs.toml"


def test_later_sources_win(toml: Path) -> None:
    toml.write_text('mode = "relay"\ncapacity = "4GiB"\nmount = "/file"\n')
    environ = {"KVFS_CAPACITY": "5GiB", "KVFS_MOUNT": "/environment"}
    config, origins = load({"mount": "/flag"}, file=toml, environ=environ)
    assert str(config.mount) == "/flag"
    assert config.capacity == Capacity(size_bytes=5 << 30)
    assert config.mode == "relay"
    assert origins["mount"] == "flag: --mount"
    assert origins["capacity"] == "environment: KVFS_CAPACITY"
    assert origins["mode"] == f"{toml}: mode"
    assert origins["suid"] == "default"


def test_the_file_may_be_named_by_the_environment(toml: Path) -> None:
    toml.write_text('log_level = "debug"')
    config, _ = load(environ={"KVFS_CONFIG": str(toml)})
    assert config.log_level == "debug"


def test_an_unknown_key_names_the_nearest_known_one(toml: Path) -> None:
    toml.write_text('capacty = "4GiB"')
    with pytest.raises(ConfigError, match=r"kvfs\.toml: capacty: .* did you mean capacity\?"):
        load(file=toml, environ={})


def test_an_unknown_variable_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"KVFS_STOER: .* did you mean KVFS_STORE\?"):
        load(environ={"KVFS_STOER": "/x"})


def test_a_key_like_no_other_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="there are: store, mount"):
        load(environ={"KVFS_ZZZZZZ": "1"})


def test_the_tests_own_variables_are_left_alone() -> None:
    assert load(environ={"KVFS_TEST_SEED": "1"})[0] == load(environ={})[0]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"KVFS_MODE": "rely"}, r"KVFS_MODE: must be one of .*; did you mean relay\?"),
        ({"KVFS_CAPACITY": "lots"}, "KVFS_CAPACITY: 'lots' is not a size"),
        ({"KVFS_CAPACITY": "120%"}, "KVFS_CAPACITY: '120%' is not a share"),
        ({"KVFS_SUID": "maybe"}, "KVFS_SUID: must be true or false"),
        ({"KVFS_LOG_LEVEL": "loud"}, "KVFS_LOG_LEVEL: must be one of debug"),
        ({"KVFS_STORE": ""}, "KVFS_STORE: must be a path"),
        ({"KVFS_S3": "9000"}, "KVFS_S3: must be HOST:PORT like '127.0.0.1:9000', 'auto' or 'off'"),
        ({"KVFS_S3": "h:70000"}, "KVFS_S3: 70000 is no port"),
        ({"KVFS_S3_WORKERS": "none"}, "KVFS_S3_WORKERS: must be a number from 1 to 64"),
        ({"KVFS_S3_WORKER": "1"}, r"KVFS_S3_WORKER: .* did you mean KVFS_S3_WORKERS\?"),
        ({"KVFS_S3_DOMAINS": "a/b"}, "KVFS_S3_DOMAINS: must be names of hosts"),
        ({"KVFS_S3_REGION": "US East"}, "KVFS_S3_REGION: must be a name like 'us-east-1'"),
        ({"KVFS_S3_PRIVATE_KEY": "/k"}, "KVFS_S3_PRIVATE_KEY: needs s3_certificate"),
        ({"KVFS_S3": "h:1", "KVFS_ADMIN": "h:1"}, "KVFS_ADMIN: h:1 is where the S3 API listens"),
        ({"KVFS_ENGINE": "localhost:6379"}, "KVFS_ENGINE: must be a URL that begins with redis://"),
        ({"KVFS_NODE_NAME": "a b"}, "KVFS_NODE_NAME: must be a name like 'gpu-07'"),
        ({"KVFS_ADVERTISE": "h:x"}, "KVFS_ADVERTISE: must be HOST:PORT"),
        ({"KVFS_TRANSPORT": "rmda"}, r"KVFS_TRANSPORT: must be one of tcp, rdma.* mean rdma\?"),
        ({"KVFS_ZONE": "z/1"}, "KVFS_ZONE: must be a name like 'zone-1'"),
        ({"KVFS_ENGINE": "redis://h", "KVFS_PEER": "off"}, "KVFS_PEER: a node of a cluster serves"),
        (
            {"KVFS_ENGINE": "redis://h", "KVFS_PEER": "h:1", "KVFS_S3": "h:1"},
            "KVFS_PEER: h:1 is where s3 listens",
        ),
    ],
)
def test_a_senseless_value_names_where_it_stands(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(environ=environ)


def test_a_value_of_the_wrong_type_in_the_file(toml: Path) -> None:
    toml.write_text("capacity = true")
    with pytest.raises(ConfigError, match="capacity: must be a size"):
        load(file=toml, environ={})


def test_a_broken_file_is_named(toml: Path) -> None:
    toml.write_text("mode = ")
    with pytest.raises(ConfigError, match=r"kvfs\.toml: not valid TOML"):
        load(file=toml, environ={})


def test_a_missing_file_is_an_error_when_it_was_asked_for(toml: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration: No such file"):
        load(file=toml, environ={})


def test_what_is_shown_can_be_read_back() -> None:
    config, _ = load({"capacity": "1500", "suid": True}, environ={})
    again, _ = load(config.as_dict(), environ={})
    assert again == config


def test_addresses_of_every_kind() -> None:
    for text, where in (
        ("0.0.0.0:80", Address("0.0.0.0", 80)),
        ("[::1]:0", Address("::1", 0)),
        ("auto", "auto"),
        ("off", "off"),
    ):
        config, _ = load({"s3": text}, environ={})
        assert config.s3 == where
        assert str(config.s3) == text


def test_a_lone_node_is_told_that_it_has_no_peers() -> None:
    with pytest.raises(ConfigError, match="flag: --zone: only nodes of a cluster have one"):
        load({"zone": "a"}, environ={})
    with pytest.raises(ConfigError, match="flag: --transport: only nodes of a cluster"):
        load({"transport": "rdma"}, environ={})
    config, _ = load({"zone": "a", "engine": "redis://h"}, environ={"KVFS_PEER": "h:7000"})
    assert (config.zone, config.peer) == ("a", Address("h", 7000))
    assert load(environ={"KVFS_ZONE": "a"})[0].zone == "a"  # one file for hosts of both kinds


def test_a_list_of_domains_from_file_and_environment(toml: Path) -> None:
    toml.write_text('s3_domains = ["S3.Example.com", "localhost"]\ns3_workers = 3')
    config, _ = load(file=toml, environ={})
    assert config.s3_domains == ("s3.example.com", "localhost")
    assert config.s3_workers == 3
    again, _ = load(environ={"KVFS_S3_DOMAINS": "a.example, b.example"})
    assert again.s3_domains == ("a.example", "b.example")


def test_every_setting_has_a_converter_and_a_flag() -> None:
    from cli.settings_options import _OPTIONS

    assert set(_OPTIONS) == set(KEYS)
    assert configuration.MODES[0] == "auto"
