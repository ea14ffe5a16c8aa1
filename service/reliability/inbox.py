"""The inbox: which messages a consumer has processed, decided by a primary key inside the handler's transaction.

`INSERT … ON CONFLICT DO NOTHING` waits for a concurrent copy and is right whether that one commits or rolls back.
The conflict target is named: without it, another unique violation would pass for a duplicate.
"""

from enum import Enum, auto

from service.reliability.connection import Connection

CLAIM = """
insert into processed_messages (consumer, message_id, digest)
values ($1, $2, $3)
on conflict (consumer, message_id) do nothing
returning true
"""

DIGEST = "select digest from processed_messages where consumer = $1 and message_id = $2"


class Claim(Enum):
    """What became of the attempt to be the one who processes a message."""

    NEW = auto()
    """This transaction processes it; the claim goes with its commit and disappears with its rollback."""
    DUPLICATE = auto()
    """It is processed already, with the same content."""
    CONFLICT = auto()
    """The id is taken by a message with other content: a producer's error."""


async def claim(connection: Connection, consumer: str, message_id: str, digest: bytes) -> Claim:
    """Claim the message for this transaction; waits while a concurrent copy is being processed.

    Args:
        connection: inside a READ COMMITTED transaction; a stricter one could not see the winner's row.
        consumer: the handler's stable name.
        message_id: the producer's.
        digest: of type and content, as `envelope.digest` makes it.
    """
    if await connection.fetchval(CLAIM, consumer, message_id, digest):
        return Claim.NEW
    stored = await connection.fetchval(DIGEST, consumer, message_id)
    if stored is None:  # pruned in between
        return await claim(connection, consumer, message_id, digest)
    return Claim.DUPLICATE if stored == digest else Claim.CONFLICT
