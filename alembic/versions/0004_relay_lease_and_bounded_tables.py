"""The relay's lease, what people do to events, and the indexes and storage settings that keep the tables bounded."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# By default a table is vacuumed and analysed when a fifth of it has changed: with a million rows far too late.
STORAGE = {
    "autovacuum_vacuum_scale_factor": "0.01",
    "autovacuum_vacuum_threshold": "1000",
    "autovacuum_vacuum_insert_scale_factor": "0.05",
    "autovacuum_analyze_scale_factor": "0.02",
}


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "relay_lease",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Uuid(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("relay_lease_pkey")),
    )
    op.create_table(
        "outbox_actions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Uuid(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("acted_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("outbox_actions_pkey")),
    )
    op.add_column("outbox_messages", sa.Column("attempted_at", sa.DateTime(timezone=True), nullable=True))
    op.create_index(
        "outbox_messages_key_idx",
        "outbox_messages",
        ["key", "sequence"],
        postgresql_where=sa.text("COALESCE(sent_at, quarantined_at) IS NULL"),
    )
    op.create_index(
        "outbox_messages_sent_idx", "outbox_messages", ["sent_at"], postgresql_where=sa.text("sent_at IS NOT NULL")
    )
    op.create_index(
        "outbox_messages_quarantined_idx",
        "outbox_messages",
        ["sequence"],
        postgresql_where=sa.text("quarantined_at IS NOT NULL"),
    )
    op.create_index("processed_messages_processed_at_idx", "processed_messages", ["processed_at"])
    settings = ", ".join(f"{name} = {value}" for name, value in STORAGE.items())
    for table in ("outbox_messages", "processed_messages"):
        op.execute(f"ALTER TABLE {table} SET ({settings})")


def downgrade() -> None:
    """Take back."""
    for table in ("outbox_messages", "processed_messages"):
        op.execute(f"ALTER TABLE {table} RESET ({', '.join(STORAGE)})")
    op.drop_index("processed_messages_processed_at_idx", "processed_messages")
    for name in ("quarantined", "sent", "key"):
        op.drop_index(f"outbox_messages_{name}_idx", "outbox_messages")
    op.drop_column("outbox_messages", "attempted_at")
    op.drop_table("outbox_actions")
    op.drop_table("relay_lease")
