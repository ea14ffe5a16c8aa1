"""Destinations that take nothing wait, and are probed."""

from service.reliability.destinations import Destination, Destinations

HERE = Destination("billing", "invoice.created")
THERE = Destination("billing", "invoice.paid")


def test_where_nobody_is_bound_the_first_failure_is_enough() -> None:
    destinations = Destinations()
    destinations.failed(HERE, 0.0, 0.0, holds_keys=False)
    assert destinations.waits(HERE)
    assert not destinations.waits(THERE)
    assert list(destinations.waiting()) == [HERE]
    assert list(destinations.holding()) == []


def test_a_single_refusal_may_be_the_events_own_fault() -> None:
    destinations = Destinations()
    destinations.failed(HERE, 0.0, 0.0, holds_keys=True)
    assert not destinations.waits(HERE)
    assert destinations.next_probe() is None
    destinations.failed(HERE, 0.0, 0.0, holds_keys=True)
    assert list(destinations.holding()) == [HERE]


def test_a_confirm_between_two_refusals_shows_that_it_takes_events() -> None:
    destinations = Destinations()
    destinations.failed(HERE, 0.0, 0.0, holds_keys=True)
    assert not destinations.confirmed(HERE)
    destinations.failed(HERE, 0.0, 0.0, holds_keys=True)
    assert not destinations.waits(HERE)


def test_probes_become_rarer_up_to_every_five_seconds() -> None:
    destinations, now, pauses = Destinations(), 0.0, []
    for _ in range(7):
        destinations.failed(HERE, now, 0.0, holds_keys=False)
        assert destinations.to_probe(now) == []
        due = destinations.next_probe()
        assert due is not None
        pauses.append(due - now)
        now = due
        assert destinations.to_probe(now) == [HERE]
    assert pauses == [0.5, 1, 2, 4, 5, 5, 5]


def test_those_that_failed_together_count_once() -> None:
    destinations = Destinations()
    for _ in range(100):
        destinations.failed(HERE, 0.0, 0.0, holds_keys=True)
    assert destinations.next_probe() == 0.5


def test_a_confirm_says_whether_others_waited() -> None:
    destinations = Destinations()
    assert not destinations.confirmed(HERE)
    destinations.failed(HERE, 0.0, 0.0, holds_keys=False)
    assert destinations.confirmed(HERE)
    assert not destinations.waits(HERE)
