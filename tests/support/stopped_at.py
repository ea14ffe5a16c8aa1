"""The service, standing still at a named barrier: `python -m tests.support.stopped_at POINT [stock|killer|failing]`.

It writes the log record `barrier_reached` and never goes on; the test kills it there. With `stock`, its subscriber is
the one that adds to a stock; with `killer`, one that some messages make kill the process; with `failing`, one that
fails as often as the message says; at the point `never` it runs like any other.
"""

import asyncio
import os
import signal
import sys

import structlog
import uvloop

from service.app import BillingUnitOfWork, Service
from service.billing import handlers
from service.settings import load_settings
from service.telemetry import configure_logging
from tests.support.stock import Received, add, subscribe_with


async def add_or_kill(received: Received, work: BillingUnitOfWork) -> None:
    """Add to the stock; a message for `killer` kills the process after `quantity` milliseconds instead."""
    if received.sku == "killer":
        await asyncio.sleep(received.quantity / 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    await add(received, work)


async def add_or_fail(received: Received, work: BillingUnitOfWork) -> None:
    """Add to the stock, and fail after it in the first `failures` attempts."""
    await add(received, work)
    if work._cause.attempt <= received.failures:
        raise RuntimeError("the test wants it")


ACTS = {"stock": add, "killer": add_or_kill, "failing": add_or_fail}


async def main(stop_at: str, variant: str) -> None:
    """Run the service with a barrier that holds at `stop_at`."""
    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format)

    async def barrier(point: str) -> None:
        if point == stop_at:
            structlog.get_logger("service.barrier").info("barrier_reached", point=point)
            await asyncio.Event().wait()

    subscribe = subscribe_with(ACTS[variant]) if variant in ACTS else handlers.subscribe
    service = Service(settings, barrier=barrier, subscribe=subscribe)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.stopping.set)
    await service.run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[-1]))
