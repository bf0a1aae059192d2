"""The documents say what the code does."""

import re
from pathlib import Path

from cli.settings_page import page
from s3api.model.routing import STS
from s3api.operations import HANDLERS, SPECIAL
from s3api.operations.documented import FATES, SUPPORTED, table

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_table_of_operations_is_the_code_s() -> None:
    """Mend it with: ./dev python -m s3api.operations.documented"""
    document = (ROOT / "docs/s3.md").read_text()
    assert table() in document


def test_every_operation_that_is_answered_is_in_the_table() -> None:
    fates = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table(), re.MULTILINE))
    for name in {*HANDLERS, *SPECIAL} - {STS}:
        assert fates[name] == FATES.get(name, SUPPORTED)


def test_the_page_of_settings_is_the_declaration_s() -> None:
    """Mend it with: ./dev python -m cli.settings_page > docs/settings.md"""
    assert (ROOT / "docs/settings.md").read_text() == page()
