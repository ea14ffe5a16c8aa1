"""The alarm on the parking queue: told once for a rise, not at every look."""

from service.alarm import ParkingAlarm, Spell


def test_it_tells_once_when_the_threshold_is_reached_and_not_before() -> None:
    alarm = ParkingAlarm(threshold=3)
    assert [alarm.look(count, now) for now, count in enumerate((0, 2, 3, 3, 4, 20))] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]


def test_it_tells_again_when_ten_times_as_much_is_there_and_after_an_hour() -> None:
    alarm = ParkingAlarm(threshold=2)
    assert alarm.look(5, 0)
    assert not alarm.look(49, 10)
    assert alarm.look(50, 20)
    assert not alarm.look(499, 3619)
    assert alarm.look(499, 3620)


def test_a_queue_that_somebody_looks_at_is_no_fall() -> None:
    """Everything is in that person's hands for some seconds, then it is back."""
    alarm = ParkingAlarm(threshold=1)
    assert alarm.look(2, 0)
    assert not alarm.look(0, 10)
    assert not alarm.look(2, 20)
    assert alarm.filled_seconds(20) == 20


def test_a_fall_that_lasts_ends_it_and_the_next_rise_is_told() -> None:
    alarm = ParkingAlarm(threshold=1)
    assert alarm.look(2, 0)
    for now in (10, 20, 30):
        assert not alarm.look(0, now)
    assert alarm.filled_seconds(30) == 0
    assert alarm.look(1, 40)
    assert alarm.filled_seconds(45) == 5


def test_zero_never_tells_and_the_age_is_known_all_the_same() -> None:
    alarm = ParkingAlarm(threshold=0)
    assert not alarm.look(1000, 0)
    assert not alarm.look(100_000, 4000)
    assert alarm.filled_seconds(4000) == 4000


def test_a_spell_that_never_began_does_not_end() -> None:
    spell = Spell()
    spell.look(0, holds=False)
    assert spell.began is None
