"""Sockets that notice when the other end is gone: neither client library asks its kernel to, which then takes hours."""

import socket

SILENCE = 9
"""Seconds after which the kernel gives up a connection to a host that vanished: one that waits for an answer, which it
asks for signs of life, as well as one whose data nobody acknowledges. Its own default is a quarter of an hour."""

_OPTIONS = {
    "TCP_USER_TIMEOUT": SILENCE * 1000,  # milliseconds
    "TCP_KEEPIDLE": SILENCE // 3,  # seconds without data, then a probe
    "TCP_KEEPINTVL": SILENCE // 3,  # seconds between probes
    "TCP_KEEPCNT": 3,
}
"""Set where the platform has them."""


def watch(connected: socket.socket) -> None:
    """Have the kernel end the connection when its other end has vanished."""
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
