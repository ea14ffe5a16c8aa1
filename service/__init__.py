"""A billing service whose point is reliability: order events in, invoices kept, invoice events out.

The way in: `reliability.consumer` receives from `orders.work`, `reliability.middleware` runs envelope, decode, claim,
handler and commit, `billing.handlers` say what a message means, `reliability.settlement` tells the broker.

The way out: a handler appends to the outbox in its transaction, `reliability.relay` publishes what was committed.

Read `app` for how the parts are wired, then `reliability` and `billing` in the order that their first lines give.
`cli` is the command line, `contract` the names that others rely on, `asyncapi` the document that tells them,
`settings` what can be configured, `database`, `health`, `http`, `management` and `telemetry` are the edges, `status`
and `samples` serve the command line, `testing` those who write subscribers. `demo` judges all of it from outside and
shares no code with it.
"""
