"""For the tests of those who write subscribers: the service without servers, and its database in memory."""

from service.testing.kit import InMemoryService, Settled, Successor
from service.testing.memory import MemoryDatabase, MemoryEvent

__all__ = ["InMemoryService", "MemoryDatabase", "MemoryEvent", "Settled", "Successor"]
