"""Delivery guarantees on RabbitMQ and PostgreSQL: knows "message", never "order".

Read in this order:

* what can happen, pure: `outcome`, `errors`, `retry`, `envelope`
* what is stored, all its SQL: `tables`, `connection`, `inbox`, `outbox`, `unit_of_work`
* how it meets the broker: `stopping`, `barrier`, `frames`, `hosts`, `link`, `topology`, `strategies`, `publisher`,
  `settlement`, `inbound`, `middleware`, `consumer`, `relay`, `parking`

The path of a message in reads top to bottom in `middleware`, the path of an event out in `relay`.
This module imports nothing: importing a submodule runs it, which the import contracts cannot see.
"""
