"""The broker's management interface, read only: it tells what AMQP does not, such as policies and bindings.

A user with the tag `management` and any right in the virtual host may read all of that; the number of nodes takes the
tag `monitoring`.
"""

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import httpx

from service.reliability.comparison import Differences, Found, differences
from service.reliability.errors import ReliabilityError
from service.reliability.topology import Topology

TIMEOUT = 10.0
"""Seconds for each answer."""

FORBIDDEN = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class ManagementError(ReliabilityError):
    """The management interface does not tell; the text says why, without credentials."""


@dataclass(frozen=True, slots=True)
class Inside:
    """What is in a queue and cannot be consumed; behind by up to ten seconds, so nothing is decided by it.

    Attributes:
        unacknowledged: delivered, and not settled yet.
        held: dead letters whose target has not taken them; the broker keeps them here and tries again.
    """

    unacknowledged: int
    held: int


class Management:
    """A client of the management interface; use it as a context."""

    def __init__(self, url: str) -> None:
        """Take the address apart: credentials in an address end up in logs and error texts.

        Args:
            url: `http://` or `https://user:password@host:port`, perhaps with the interface's path prefix.
        """
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")[2]
        self._place = place
        self._client = httpx.AsyncClient(
            base_url=urlunsplit((parts.scheme, place, f"{parts.path.rstrip('/')}/api/", "", "")),
            auth=(unquote(parts.username or ""), unquote(parts.password or "")),
            timeout=TIMEOUT,
            verify=ssl.create_default_context() if parts.scheme == "https" else False,  # the system's, as for amqps
            trust_env=False,  # no proxy stands between a service and its broker
        )

    async def get(self, *path: str, **query: str) -> Any:
        """Return what is under a path, whose parts are quoted here; None where this user may not know.

        Raises:
            ManagementError: no such thing, no answer, or another failure.
        """
        try:
            answer = await self._client.get("/".join(quote(part, safe="") for part in path), params=query)
            if answer.status_code in FORBIDDEN:
                return None
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPStatusError as error:
            raise ManagementError(
                f"the management interface at {self._place} answered {error.response.status_code} to {'/'.join(path)}"
            ) from None
        except (httpx.HTTPError, ValueError) as error:
            raise ManagementError(
                f"the management interface at {self._place} did not answer: {type(error).__name__}"
            ) from None

    async def found(self, vhost: str) -> Found:
        """Return what a virtual host has.

        Raises:
            ManagementError: as above, or the user may not see the virtual host.
        """
        # Without statistics queues are told as they are now, and not as they were some seconds ago.
        queues = await self.get("queues", vhost, disable_stats="true")
        others = [await self.get(kind, vhost) for kind in ("exchanges", "bindings", "policies", "operator-policies")]
        if queues is None or None in others:
            raise ManagementError(
                f"the management interface at {self._place} refused the user: it takes the tag 'management', and some "
                f"right in the virtual host '{vhost}'"
            )
        exchanges, bindings, policies, operator_policies = others
        nodes = await self.get("nodes")
        return Found(exchanges, queues, bindings, policies, operator_policies, None if nodes is None else len(nodes))

    async def inside(self, vhost: str, queues: Iterable[str]) -> dict[str, Inside]:
        """Return what is in each of the queues; one that the interface does not count, or not yet, is left out.

        Raises:
            ManagementError: in one line, what is wrong.
        """
        found = await self.get("queues", vhost, columns="name,messages_unacknowledged,messages_dlx")
        if found is None:
            raise ManagementError(f"the management interface at {self._place} refused the user")
        try:
            told = {queue["name"]: queue for queue in found}
            return {
                name: Inside(int(queue["messages_unacknowledged"]), int(queue["messages_dlx"]))
                for name in queues
                if {"messages_unacknowledged", "messages_dlx"} <= (queue := told.get(name, {})).keys()
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ManagementError(f"what answers at {self._place} is no management interface") from None

    async def __aenter__(self) -> Self:
        """Return itself; nothing is opened."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close its connections."""
        await self._client.aclose()


async def compare(url: str, vhost: str, wanted: Topology, *, declared: bool) -> Differences:
    """Compare what a virtual host has with what is wanted there.

    Raises:
        ManagementError: it cannot be asked.
    """
    async with Management(url) as management:
        return differences(wanted, await management.found(vhost), declared=declared)
