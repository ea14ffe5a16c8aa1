"""The HTTP side: liveness, readiness, metrics, the contract. No page takes input, none shows a payload or a secret."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from service.health import Health
from service.telemetry import Metrics

PAGE = Path(__file__).parent / "page"

PAGE_PARTS = ("asyncapi.js", "asyncapi.css", "page.js", "page.css")

PAGE_HEADERS = {
    # The browser itself refuses whatever would not come from here. The page's parser compiles schemas: unsafe-eval.
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'unsafe-eval'; style-src 'self' 'unsafe-inline';"
    " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def web_application(
    health: Health, metrics: Metrics, refresh: Callable[[], Awaitable[None]], contract: Callable[[], str]
) -> Starlette:
    """Return the routes.

    Args:
        health: for `/readyz`: 200 while every part works, else 503; the body says which does not.
        metrics: for `/metrics`, in Prometheus' text format.
        refresh: brings gauges up to date that nobody pushes; called before `/metrics` answers.
        contract: returns the AsyncAPI document, for `/asyncapi.yaml` and the page `/asyncapi`; called once.
    """

    async def livez(_request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(_request: Request) -> Response:
        parts = await health.parts()
        ready = bool(parts) and all(parts.values())
        return JSONResponse({"ready": ready, "parts": parts}, status_code=200 if ready else 503)

    async def metrics_page(_request: Request) -> Response:
        await health.parts()
        await refresh()
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    document = cache(contract)

    async def asyncapi_yaml(_request: Request) -> Response:
        return Response(document(), media_type="application/yaml")

    async def asyncapi_page(_request: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    def page_part(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def part(_request: Request) -> Response:
            return FileResponse(PAGE / name, headers=PAGE_HEADERS)

        return part

    return Starlette(
        routes=[
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/metrics", metrics_page),
            Route("/asyncapi", asyncapi_page),
            Route("/asyncapi.yaml", asyncapi_yaml),
            *(Route(f"/asyncapi/{name}", page_part(name)) for name in PAGE_PARTS),
        ]
    )


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the service decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


@asynccontextmanager
async def serve(application: Starlette, host: str, port: int) -> AsyncIterator[int]:
    """Serve while the block runs; yield the port that was taken.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        place = f"{host}:{port} (BILLING_HTTP_HOST, BILLING_HTTP_PORT)"
        raise OSError(f"cannot listen on {place}: {error.strerror}") from error
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1, server_header=False
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()
