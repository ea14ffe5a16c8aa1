"""The names that others rely on: exchanges and event types. `asyncapi` tells them in full."""

from schemas import INCOMING

ORDERS_EXCHANGE = "orders"
ORDER_EVENTS = tuple(message.TYPE for message in INCOMING)
BILLING_EXCHANGE = "billing"
