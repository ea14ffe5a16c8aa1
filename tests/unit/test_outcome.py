"""The words by which operators and dashboards know an outcome."""

from service.reliability.outcome import Reason


def test_the_reasons_for_parking_are_the_contracts() -> None:
    assert {str(reason) for reason in Reason} == {
        "unreadable",
        "invalid",
        "missing-message-id",
        "unknown-type",
        "message-id-conflict",
        "rejected-by-rule",
        "attempts-exhausted",
        "crashed-consumer",
        "too-large",
    }
