"""The version of the programs; the formats on disk carry their own."""

from typing import Final

VERSION: Final = "0.1.0"
