# Debian's own Python in every stage: the venv that is copied finds the interpreter it was made with, and scripts/image
# can run these steps in a plain Debian folder, without Docker.

FROM debian:bookworm-slim AS build
# Unpinned: a stable release only gets fixes, and the next one would make a pinned version disappear.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/billing
ENV PATH=/opt/billing/bin:$PATH
WORKDIR /src
# The dependencies first: a layer of their own, which a change of the code leaves as it is.
COPY requirements.lock .
RUN pip install --no-cache-dir --require-hashes --requirement requirements.lock
COPY . .
# What only installs and builds has no business in the service's image.
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && pip uninstall --yes editables hatchling pathspec pluggy tomlkit trove-classifiers \
    && pip check && pip uninstall --yes setuptools pip

FROM debian:bookworm-slim AS service
# ca-certificates: for amqps:// and for a database asked with sslmode=verify-full. Unpinned: as above.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates python3 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/billing /opt/billing
ENV PATH=/opt/billing/bin:$PATH \
    BILLING_HTTP_HOST=0.0.0.0 \
    BILLING_HTTP_PORT=8000 \
    BILLING_LOG_FORMAT=json
# A folder without a .env: settings come from the environment alone.
WORKDIR /opt/billing
# By number: an orchestrator can see that it is not root. It owns nothing here.
USER 10001:10001
EXPOSE 8000
# Alive, not ready: a restart would not bring back a server that is away.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 CMD ["python", "-c", "import os, http.client; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['BILLING_HTTP_PORT']), timeout=2); c.request('GET', '/livez'); raise SystemExit(c.getresponse().status != 200)"]
# As a list: SIGTERM reaches Python itself, not a shell that would keep it.
ENTRYPOINT ["billing"]
CMD ["run"]
