"""The Python API: `Client`, and `AsyncClient` for trio."""

from kvfs.client.asynchronous import AsyncClient
from kvfs.client.blocking import Client
from kvfs.client.writer import Writer
from kvfs.session.file_status import Stat

__all__ = ["AsyncClient", "Client", "Stat", "Writer"]
