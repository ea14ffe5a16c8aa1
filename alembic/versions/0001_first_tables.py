"""The first tables: invoices with their lines, inbox, outbox."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "invoices",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("order_id", sa.Uuid(), nullable=False),
        sa.Column("customer_id", sa.Text(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("total", sa.Numeric(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("placed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("payment_reference", sa.Text(), nullable=True),
        sa.Column("paid_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("void_reason", sa.Text(), nullable=True),
        sa.Column("voided_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(status = 'paid') = (payment_reference IS NOT NULL) AND (status = 'paid') = (paid_at IS NOT NULL)",
            name=op.f("invoices_paid_check"),
        ),
        sa.CheckConstraint(
            "(status = 'void') = (void_reason IS NOT NULL) AND (status = 'void') = (voided_at IS NOT NULL)",
            name=op.f("invoices_void_check"),
        ),
        sa.CheckConstraint("currency ~ '^[A-Z]{3}$'", name=op.f("invoices_currency_check")),
        sa.CheckConstraint("status IN ('issued', 'paid', 'void')", name=op.f("invoices_status_check")),
        sa.CheckConstraint("total >= 0 AND total <= 1000000000000000", name=op.f("invoices_total_check")),
        sa.PrimaryKeyConstraint("id", name=op.f("invoices_pkey")),
        sa.UniqueConstraint("order_id", name=op.f("invoices_order_id_key")),
    )
    op.create_table(
        "outbox_messages",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("exchange", sa.Text(), nullable=False),
        sa.Column("routing_key", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("headers", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("available_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("publish_attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("quarantined_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("outbox_messages_pkey")),
        sa.UniqueConstraint("sequence", name=op.f("outbox_messages_sequence_key")),
    )
    op.create_index(
        "outbox_messages_unsent_idx",
        "outbox_messages",
        ["sequence"],
        unique=False,
        postgresql_where=sa.text("sent_at IS NULL AND quarantined_at IS NULL"),
    )
    op.create_table(
        "processed_messages",
        sa.Column("consumer", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("processed_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("consumer", "message_id", name=op.f("processed_messages_pkey")),
    )
    op.create_table(
        "invoice_lines",
        sa.Column("invoice_id", sa.Uuid(), nullable=False),
        sa.Column("line_number", sa.SmallInteger(), nullable=False),
        sa.Column("sku", sa.Text(), nullable=False),
        sa.Column("quantity", sa.Integer(), nullable=False),
        sa.Column("unit_price", sa.Numeric(), nullable=False),
        sa.CheckConstraint("line_number >= 1", name=op.f("invoice_lines_line_number_check")),
        sa.CheckConstraint("quantity >= 1 AND quantity <= 1000000", name=op.f("invoice_lines_quantity_check")),
        sa.CheckConstraint("unit_price >= 0", name=op.f("invoice_lines_unit_price_check")),
        sa.ForeignKeyConstraint(
            ["invoice_id"], ["invoices.id"], name=op.f("invoice_lines_invoice_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("invoice_id", "line_number", name=op.f("invoice_lines_pkey")),
    )


def downgrade() -> None:
    """Take back."""
    op.drop_table("invoice_lines")
    op.drop_table("processed_messages")
    op.drop_index(
        "outbox_messages_unsent_idx",
        table_name="outbox_messages",
        postgresql_where=sa.text("sent_at IS NULL AND quarantined_at IS NULL"),
    )
    op.drop_table("outbox_messages")
    op.drop_table("invoices")
