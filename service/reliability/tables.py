"""The tables of the delivery guarantees, for the migrations. The SQL that runs is in `inbox` and `outbox`."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, Column, DateTime, Identity, Index, LargeBinary, Text, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlmodel import Field, SQLModel

SQLModel.metadata.naming_convention = {
    "pk": "%(table_name)s_pkey",
    "fk": "%(table_name)s_%(column_0_name)s_fkey",
    "uq": "%(table_name)s_%(column_0_name)s_key",
    "ck": "%(table_name)s_%(constraint_name)s_check",
    "ix": "%(table_name)s_%(column_0_name)s_idx",
}
"""PostgreSQL's own way to name constraints, made explicit: code tells them apart by name, never by an error's text."""


def timestamp(*, default_now: bool = False, nullable: bool = False) -> Any:
    """Return a column for an instant; the clock that counts is the database's."""
    return Column(DateTime(timezone=True), nullable=nullable, server_default=func.now() if default_now else None)


class ProcessedMessage(SQLModel, table=True):
    """The inbox: one row for each message that a consumer has processed."""

    __tablename__ = "processed_messages"
    __table_args__ = (Index("processed_messages_processed_at_idx", "processed_at"),)

    consumer: str = Field(sa_type=Text, primary_key=True)
    message_id: str = Field(sa_type=Text, primary_key=True)
    digest: bytes = Field(sa_type=LargeBinary)
    processed_at: datetime = Field(sa_column=timestamp(default_now=True))


class StartedMessage(SQLModel, table=True):
    """Messages that came again and whose execution has begun: more starts than ends mean that it kills the process."""

    __tablename__ = "started_messages"

    consumer: str = Field(sa_type=Text, primary_key=True)
    message_id: str = Field(sa_type=Text, primary_key=True)
    starts: int
    started_at: datetime = Field(sa_column=timestamp(default_now=True))


class ParkingAction(SQLModel, table=True):
    """What people did to parked messages; a row without `finished_at` was interrupted, or is going on."""

    __tablename__ = "parking_actions"
    __table_args__ = (Index("parking_actions_unfinished_idx", "key", postgresql_where=text("finished_at IS NULL")),)

    id: int = Field(sa_column=Column(BigInteger, Identity(always=True), primary_key=True))
    action: str = Field(sa_type=Text)
    actor: str = Field(sa_type=Text)
    why: str = Field(sa_type=Text)
    message_id: str | None = Field(default=None, sa_type=Text)
    type: str = Field(sa_type=Text)
    reason: str = Field(sa_type=Text)
    parked_at: datetime | None = Field(default=None, sa_column=timestamp(nullable=True))
    key: str = Field(sa_type=Text)
    new_message_id: str | None = Field(default=None, sa_type=Text)
    started_at: datetime = Field(sa_column=timestamp(default_now=True))
    finished_at: datetime | None = Field(default=None, sa_column=timestamp(nullable=True))


class OutboxAction(SQLModel, table=True):
    """What people did to events that could not be sent."""

    __tablename__ = "outbox_actions"

    id: int = Field(sa_column=Column(BigInteger, Identity(always=True), primary_key=True))
    action: str = Field(sa_type=Text)
    actor: str = Field(sa_type=Text)
    why: str = Field(sa_type=Text)
    event_id: UUID
    type: str = Field(sa_type=Text)
    key: str = Field(sa_type=Text)
    last_error: str | None = Field(default=None, sa_type=Text)
    acted_at: datetime = Field(sa_column=timestamp(default_now=True))


class RelayLease(SQLModel, table=True):
    """Which relay is the active one, and until when: a single row."""

    __tablename__ = "relay_lease"

    name: str = Field(sa_type=Text, primary_key=True)
    holder: UUID
    instance: str = Field(sa_type=Text)
    since: datetime = Field(sa_column=timestamp(default_now=True))
    expires_at: datetime = Field(sa_column=timestamp())


class OutboxMessage(SQLModel, table=True):
    """The outbox: one row for each event, unsent until the broker has confirmed it.

    The index by key says "neither sent nor quarantined" in other words than the one by sequence, so that each serves
    one query only: before a table is analysed the planner could take either for both, at a thousand times the cost.
    """

    __tablename__ = "outbox_messages"
    __table_args__ = (
        Index(
            "outbox_messages_unsent_idx",
            "sequence",
            postgresql_where=text("sent_at IS NULL AND quarantined_at IS NULL"),
        ),
        Index(
            "outbox_messages_key_idx",
            "key",
            "sequence",
            postgresql_where=text("COALESCE(sent_at, quarantined_at) IS NULL"),
        ),
        Index("outbox_messages_sent_idx", "sent_at", postgresql_where=text("sent_at IS NOT NULL")),
        Index("outbox_messages_quarantined_idx", "sequence", postgresql_where=text("quarantined_at IS NOT NULL")),
    )

    id: UUID = Field(primary_key=True)
    sequence: int = Field(sa_column=Column(BigInteger, Identity(always=True), nullable=False, unique=True))
    exchange: str = Field(sa_type=Text)
    routing_key: str = Field(sa_type=Text)
    type: str = Field(sa_type=Text)
    key: str = Field(sa_type=Text)
    payload: bytes = Field(sa_type=LargeBinary)
    headers: dict[str, Any] = Field(sa_type=JSONB)
    created_at: datetime = Field(sa_column=timestamp(default_now=True))
    available_at: datetime = Field(sa_column=timestamp(default_now=True))
    publish_attempts: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    last_error: str | None = Field(default=None, sa_type=Text)
    attempted_at: datetime | None = Field(default=None, sa_column=timestamp(nullable=True))
    sent_at: datetime | None = Field(default=None, sa_column=timestamp(nullable=True))
    quarantined_at: datetime | None = Field(default=None, sa_column=timestamp(nullable=True))
