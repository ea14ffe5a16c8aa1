"""Billing: invoices for orders. Uses the front door of `service.reliability` and knows nothing behind it.

Read in this order: `errors`, `invoice` (the value and the table of states and events, pure), `tables`, `repository`
(its SQL), `invoicing` (the use cases), `handlers` (the subscribers). Use cases never commit: the middleware does.
"""
