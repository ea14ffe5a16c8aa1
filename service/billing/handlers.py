"""The subscribers: one thin handler per event. What a handler's docstring says is published in asyncapi.yaml."""

from typing import Annotated

from faststream import Depends

from schemas.orders import (
    OrderCancelled,
    OrderPaid,
    OrderPlaced,
)
from service.billing import invoicing
from service.billing.invoicing import BillingWork
from service.reliability.inbound import Inbound, current_unit_of_work

Work = Annotated[BillingWork, Depends(current_unit_of_work, cast=False)]


def subscribe(orders: Inbound) -> None:
    """Declare the subscribers of the order events.

    A consumer's name is its key in the inbox: never change one, or every message would count as new to it.
    """

    @orders.subscriber("order.placed", OrderPlaced, consumer="billing.order-placed")
    async def order_placed(order: OrderPlaced, work: Work) -> None:
        """Issue the order's invoice and publish `invoice.created`.

        The same order again with the same content does nothing; with other content the message is parked as
        `rejected-by-rule`, or as `message-id-conflict` where the message id is the same too.
        """
        await invoicing.issue(work, order)

    @orders.subscriber("order.paid", OrderPaid, consumer="billing.order-paid")
    async def order_paid(payment: OrderPaid, work: Work) -> None:
        """Mark the order's invoice paid and publish `invoice.paid`.

        Amount and currency must be the invoice's, else the message is parked as `rejected-by-rule`. A payment that
        overtakes its order waits and is tried again.
        """
        await invoicing.pay(work, payment)

    @orders.subscriber("order.cancelled", OrderCancelled, consumer="billing.order-cancelled")
    async def order_cancelled(cancellation: OrderCancelled, work: Work) -> None:
        """Void the order's invoice and publish `invoice.voided`.

        A paid invoice is not voided: the message is parked as `rejected-by-rule`. A cancellation that overtakes its
        order waits and is tried again.
        """
        await invoicing.void(work, cancellation)
