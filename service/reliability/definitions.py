"""The topology as broker definitions, for those who manage queues centrally.

Only the queue's type is an argument there, everything else is a policy that can be changed without making the queue
anew. The price: any policy of a higher priority takes all of it away, since a queue has one policy, and what has no
policy is lost after 20 looks or dead-lettered nowhere. `comparison` finds that.
"""

import re
from collections.abc import Mapping
from typing import Any

from service.reliability.topology import Topology

PRIORITY = 100
"""Of the policies: above the catch-alls that companies have, which are 0 or a little more."""


def definitions(topology: Topology, vhost: str) -> dict[str, Any]:
    """Return what `rabbitmqctl import_definitions` and the management interface import into an existing virtual host.

    There are neither users nor the virtual host itself in it: importing it changes nobody's rights.
    """
    return {
        "exchanges": [
            {
                "vhost": vhost,
                "name": exchange.name,
                "type": exchange.kind,
                "durable": True,
                "auto_delete": False,
                "internal": False,
                "arguments": dict(exchange.arguments),
            }
            for exchange in topology.exchanges
        ],
        "queues": [
            {
                "vhost": vhost,
                "name": queue.name,
                "durable": True,
                "auto_delete": False,
                "arguments": {"x-queue-type": queue.arguments["x-queue-type"]},
            }
            for queue in topology.queues
        ],
        "bindings": [
            {
                "vhost": vhost,
                "source": binding.exchange,
                "destination": binding.queue,
                "destination_type": "queue",
                "routing_key": binding.routing_key,
                "arguments": dict(binding.arguments),
            }
            for binding in topology.bindings
        ],
        "policies": [
            {
                "vhost": vhost,
                "name": queue.name,
                "pattern": f"^{re.escape(queue.name)}$",
                "apply-to": "queues",  # 3.10 knows no "quorum_queues"
                "priority": PRIORITY,
                "definition": policy_of(queue.arguments),
            }
            for queue in topology.queues
        ],
    }


def policy_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a queue's arguments as the policy that does the same; its type cannot be in one."""
    return {key.removeprefix("x-"): value for key, value in arguments.items() if key != "x-queue-type"}
