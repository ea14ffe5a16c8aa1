"""Logs and metrics. Neither ever holds a payload or a secret: ids, types, counts, durations.

Log events are snake_case, past tense, with fields; the standard library's loggers go the same way. Metrics live in a
registry of their own, so that two services in one process do not count into each other.
"""

import logging
import sys
from typing import Literal

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from structlog.typing import Processor

LogFormat = Literal["console", "json"]


class Metrics:
    """The service's counters and gauges."""

    def __init__(self) -> None:
        """Make a registry with every metric at zero."""
        self.registry = CollectorRegistry()
        self.deliveries = Counter(
            "billing_deliveries_total", "Deliveries settled.", ("type", "outcome"), registry=self.registry
        )
        self.parked = Counter(
            "billing_messages_parked_total", "Messages put aside for people.", ("reason",), registry=self.registry
        )
        self.handler_seconds = Histogram(
            "billing_handler_seconds",
            "Claim, handler and commit of one delivery.",
            ("consumer",),
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self.registry,
        )
        self.gate_open = Gauge(
            "billing_gate_open", "0 while deliveries are held because the database is away.", registry=self.registry
        )
        self.outages = Counter(
            "billing_deliveries_held_total", "Executions put off because the database was away.", registry=self.registry
        )
        self.successors_refused = Counter(
            "billing_successors_refused_total",
            "Copies for a wait or parking queue that the broker did not confirm; the original is held.",
            ("queue",),
            registry=self.registry,
        )
        self.broker_blocked = Gauge(
            "billing_broker_blocked",
            "1 while the broker reads nothing that is published: its memory or disk is short.",
            registry=self.registry,
        )
        self.topology_differences = Gauge(
            "billing_topology_differences",
            "Problems that the management interface tells of queues, policies and bindings.",
            registry=self.registry,
        )
        self.publications = Counter(
            "billing_outbox_publications_total", "Events published, by outcome.", ("outcome",), registry=self.registry
        )
        for outcome in ("confirmed", "returned", "refused", "unconfirmed", "quarantined"):
            self.publications.labels(outcome)
        self.outbox_unsent = Gauge("billing_outbox_unsent", "Events waiting to leave.", registry=self.registry)
        self.outbox_oldest_seconds = Gauge(
            "billing_outbox_oldest_seconds", "Age of the oldest unsent event.", registry=self.registry
        )
        self.relay_active = Gauge(
            "billing_relay_active", "1 where this instance holds the relay's lease.", registry=self.registry
        )
        self.relay_listening = Gauge(
            "billing_relay_listening",
            "1 where this instance's relay is active and is woken by the commits of others; where it is active and 0, "
            "their events wait for the poll.",
            registry=self.registry,
        )
        self.parking_length = Gauge(
            "billing_parked",
            "Messages in the parking queue; fewer for the seconds in which a person looks at them. Every instance "
            "tells the same: take the maximum.",
            registry=self.registry,
        )
        self.parking_oldest_seconds = Gauge(
            "billing_parked_oldest_seconds",
            "For how long this instance has seen the parking queue hold something: the age of its oldest message, "
            "unless that is older than the instance, or somebody took it out and left others. Take the maximum.",
            registry=self.registry,
        )
        self.dead_letters_held = Gauge(
            "billing_dead_letters_held",
            "Dead letters that the broker keeps in a queue since their target does not take them. Only where "
            "BILLING_RABBITMQ_MANAGEMENT_URL is set; every instance tells the same: take the maximum.",
            ("queue",),
            registry=self.registry,
        )
        self.frames_guarded = Gauge(
            "billing_frames_guarded",
            "0 where a frame that the client library cannot decode would stop the consumer.",
            registry=self.registry,
        )
        ProcessCollector(namespace="billing", registry=self.registry)
        self.ready = Gauge("billing_ready", "1 while every part works.", ("part",), registry=self.registry)


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Send structlog's and the standard library's records to stderr, as lines for people or as JSON.

    Only the process's entry point calls this. Third parties' records below WARNING are dropped: the clients log
    message bodies at DEBUG.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("service").setLevel(level)
    for client in ("aiormq", "aio_pika"):
        # They print whole messages, bodies included; what matters of their failures is logged by our own modules.
        logging.getLogger(client).setLevel(logging.CRITICAL)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
