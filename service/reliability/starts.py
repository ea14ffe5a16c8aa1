"""Crashes, counted where they happen: a mark for each start of a message that may kill the process.

The broker's own count grows for every message that was merely prefetched when a process died. So only a delivery that
comes again is marked, just before it is decoded and executed, alone; the mark is taken away when the execution has
ended, however it did. What a dead process left behind are the starts that nobody survived.
"""

from service.reliability.connection import Connection

MOST_CRASHES = 3
"""Starts that were not survived, after which a message is parked as `crashed-consumer` instead of started again."""

COUNT = """
insert into started_messages as message (consumer, message_id, starts)
values ($1, $2, 1)
on conflict (consumer, message_id) do update set starts = message.starts + 1
returning starts
"""

CLEAR = "delete from started_messages where consumer = $1 and message_id = $2"


async def count(connection: Connection, consumer: str, message_id: str, timeout: float) -> int:  # noqa: ASYNC109 - the driver's
    """Write down that an execution starts, outside of any transaction; return how many were, this one included."""
    return int(await connection.fetchval(COUNT, consumer, message_id, timeout=timeout))


async def clear(connection: Connection, consumer: str, message_id: str, timeout: float) -> None:  # noqa: ASYNC109 - the driver's
    """Forget the starts of a message."""
    await connection.execute(CLEAR, consumer, message_id, timeout=timeout)
