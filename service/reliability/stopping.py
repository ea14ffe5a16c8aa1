"""The signal to stop, pauses that end with it, and telling a cancellation from a client's misuse of its exception."""

import asyncio
from datetime import timedelta


class Stopping(asyncio.Event):
    """Set once, when the service is asked to stop."""

    async def pause(self, duration: timedelta) -> None:
        """Wait for `duration`, or until the service stops."""
        try:
            async with asyncio.timeout(duration.total_seconds()):
                await self.wait()
        except TimeoutError:
            return


def is_being_cancelled() -> bool:
    """Tell, in an `except CancelledError`, whether this task was cancelled.

    The broker's client raises CancelledError in tasks that nobody cancelled, when their connection dies by heartbeat.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
