from pathlib import Path

import pytest

from kvfs import config as configuration
from kvfs.config import KEYS, load
from kvfs.errors import ConfigError
from kvfs.units import Capacity


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


def test_every_setting_has_a_converter_and_a_flag() -> None:
    from cli.settings import _OPTIONS

    assert set(_OPTIONS) == set(KEYS)
    assert configuration.MODES[0] == "auto"
