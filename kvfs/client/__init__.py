"""The Python API: `Client`, and `AsyncClient` for trio."""

from kvfs.client.asynchronous import AsyncClient
from kvfs.client.blocking import Client
from kvfs.client.file_status import Stat
from kvfs.client.match import Match
from kvfs.client.writer import Writer

__all__ = ["AsyncClient", "Client", "Match", "Stat", "Writer"]
