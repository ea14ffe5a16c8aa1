"""A virtual host on a node with the management interface, wrong in whatever way a test wants it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from tests.support.own_broker import OwnBroker
from tests.support.rabbit import PASSWORD, USER

ALL = (".*", ".*", ".*")


@dataclass(frozen=True, slots=True)
class Managed:
    """An administrator of one virtual host, who imports nothing from `service`."""

    node: OwnBroker
    vhost: str

    @property
    def url(self) -> str:
        """Return the address for AMQP."""
        return self.node.url(self.vhost)

    def call(self, method: str, *path: str, json: Any = None) -> Any:
        """Call the interface; what it refuses is an error with what it said. `{vhost}` stands for the virtual host."""
        place = "/".join(quote(self.vhost if part == "{vhost}" else part, safe="") for part in path)
        answer = httpx.request(
            method,
            f"http://127.0.0.1:{self.node.management_port}/api/{place}",
            auth=(USER, PASSWORD),
            json=json,
            timeout=30,
        )
        assert answer.is_success, f"{method} {place}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def make(self) -> "Managed":
        """Make the virtual host, empty."""
        self.call("PUT", "vhosts", "{vhost}", json={})
        self.may(USER, *ALL)
        return self

    def delete(self) -> None:
        """Delete it with everything in it."""
        self.call("DELETE", "vhosts", "{vhost}")

    def may(self, user: str, configure: str, write: str, read: str) -> None:
        """Give a user, who is made with the usual password where there is none, these rights."""
        if user != USER:
            self.call("PUT", "users", user, json={"password": PASSWORD, "tags": "management"})
        rights = {"configure": configure, "write": write, "read": read}
        self.call("PUT", "permissions", "{vhost}", user, json=rights)

    def policy(self, pattern: str, *, apply_to: str = "queues", kind: str = "policies", **definition: Any) -> None:
        """Make the policy `theirs`; underscores of the definition's names stand for dashes."""
        definition = {key.replace("_", "-"): value for key, value in definition.items()}
        json = {"pattern": pattern, "definition": definition, "priority": 1, "apply-to": apply_to}
        self.call("PUT", kind, "{vhost}", "theirs", json=json)

    def queue(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Make a queue anew, with these arguments."""
        self.call("DELETE", "queues", "{vhost}", name)
        self.call("PUT", "queues", "{vhost}", name, json={"durable": True, "arguments": dict(arguments)})

    def exchange(self, name: str, **properties: Any) -> None:
        """Make an exchange anew, with these properties."""
        self.call("DELETE", "exchanges", "{vhost}", name)
        self.call("PUT", "exchanges", "{vhost}", name, json={"type": "topic", "durable": True} | properties)
