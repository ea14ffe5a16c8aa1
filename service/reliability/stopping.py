"""The signal to stop, and pauses that end with it."""

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
