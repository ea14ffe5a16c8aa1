"""Free ports for servers that tests start, stop and start again."""

import random
import socket

PORTS = range(15000, 30000)
"""Below those that connections are made from: one of them could take a server's while it is down."""


def free_port() -> int:
    """Return a port that nobody listens on and nobody connects from."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
