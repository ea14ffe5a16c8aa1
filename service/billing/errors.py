"""What can be wrong with an event, by what is done about it.

BillingError
├── RuleViolationError   contradicts the invoice: parked at once as `rejected-by-rule`
├── OrderUnknownError    there is no invoice yet: the event may have overtaken its order and is tried again
└── InvoiceChangedError  the invoice is no longer what the decision was made on: tried again

Texts name ids, states and rules, never a customer's data: they are logged and travel in headers.
"""


class BillingError(Exception):
    """Root of this package's errors."""


class RuleViolationError(BillingError):
    """The event contradicts what the invoice says; waiting would not help."""


class OrderUnknownError(BillingError):
    """No invoice was issued for the order, so far."""


class InvoiceChangedError(BillingError):
    """The invoice changed between the decision and its storing; under its lock that cannot happen."""
