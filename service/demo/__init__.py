"""The demo: the main job on real servers, through crashes and restarts, with a verdict by an auditor of its own.

It imports nothing of what it judges: it starts the service as processes, sends as any producer, reads as any consumer
and with plain SQL, and compares with what it worked out itself from what it sent. An import contract holds that.

Read in this order: `orders` (what is sent and what must become of it), `scenario` (what is done to the service),
`checks` (what is compared), then the parts: `producer`, `process`, `auditor`, `servers`, `report`. `main` runs them.
"""
