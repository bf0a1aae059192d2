"""The address at which the NFS door listens."""

import errno
import socket

from kvfs.base.config import Address
from kvfs.base.errors import Busy, Invalid


def bound(address: Address) -> Address:
    """Returns the address with numbers for both host and port, at which nobody listens now. Raises
    Busy, Invalid."""
    kind = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address.host, address.port))
            host, port = trial.getsockname()[:2]
    except socket.gaierror as error:
        raise Invalid(f"{address.host}: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Busy(
                f"another program listens at {address}: choose another port for NFS"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise Invalid(f"{address.host} is no address of this machine") from error
        raise
    return Address(host, port)
