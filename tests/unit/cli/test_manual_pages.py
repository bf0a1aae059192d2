"""The manual pages name all commands, options and settings, and man(1) shows them as they are."""

import shutil
import subprocess
from pathlib import Path

import click
import pytest

from cli import manual_pages
from cli.root import group
from kvfs.base.config import KEYS


def shown(path: Path) -> str:
    """What man(1) makes of a page. Fails on a warning."""
    command = ["man", "--warnings", "--local-file", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"MANWIDTH": "200", "PATH": "/usr/bin:/bin"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def commands(command: click.Command, name: str) -> set[str]:
    if not isinstance(command, click.Group):
        return {name}
    context = click.Context(command)
    found = {each: command.get_command(context, each) for each in command.list_commands(context)}
    below = [commands(each, f"{name}-{at}") for at, each in found.items() if each is not None]
    return {name}.union(*below)


def test_each_command_has_a_page() -> None:
    names = {Path(name).stem for name in manual_pages.pages() if name.startswith("man1/")}
    assert names == commands(group, "kvfs")


@pytest.mark.skipif(not shutil.which("groff"), reason="no groff: man(1) formats nothing")
def test_pages_are_shown_as_they_are(tmp_path: Path) -> None:
    manual_pages.main(str(tmp_path))
    up = shown(tmp_path / "man1/kvfs-up.1")
    assert "--no-allow-other" in up
    assert "a share of its disk (default: 90%)" in up
    settings = shown(tmp_path / "man5/kvfs.toml.5")
    assert [key for key in KEYS if f" {key} " not in settings.replace("\n", " ")] == []
    assert "mount.kvfs [OPTIONS] STORE DIRECTORY" in shown(tmp_path / "man8/mount.kvfs.8")
    assert "\n  130  interrupted".replace("\n", "") in up
