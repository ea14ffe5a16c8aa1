"""What a failure leads to."""

import re
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from service.reliability.errors import HandlerTimeoutError, PermanentError
from service.reliability.outcome import Park, Reason, Retry
from service.reliability.retry import RetryPolicy, backoff, diagnose, is_outage


class RuleError(Exception):
    """A domain's error whose text is safe."""


class SpecialRuleError(RuleError):
    """A kind of it."""


POLICY = RetryPolicy(
    max_attempts=5,
    delays=(timedelta(seconds=5), timedelta(seconds=30), timedelta(seconds=120)),
    permanent={RuleError: Reason.REJECTED_BY_RULE},
    safe=(RuleError,),
)


def postgres_error(state: str, text: str = "any text, in any language") -> asyncpg.PostgresError:
    """Return an error as the driver raises it."""
    return asyncpg.PostgresError.new({"C": state, "M": text, "n": "some_constraint"})


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 5), (2, 30), (3, 120), (4, 120)])
def test_each_attempt_has_its_delay_and_the_last_repeats(attempt: int, seconds: int) -> None:
    outcome = POLICY.decide(RuntimeError(), attempt)
    assert isinstance(outcome, Retry)
    assert outcome.delay == timedelta(seconds=seconds)
    assert outcome.next_attempt == attempt + 1


@pytest.mark.parametrize("attempt", [5, 6, 100])
def test_the_last_attempt_parks_and_so_does_one_beyond_it(attempt: int) -> None:
    outcome = POLICY.decide(RuntimeError(), attempt)
    assert isinstance(outcome, Park)
    assert (outcome.reason, outcome.attempts) == (Reason.ATTEMPTS_EXHAUSTED, attempt)


def test_a_permanent_failure_of_the_last_attempt_keeps_its_own_reason() -> None:
    outcome = POLICY.decide(RuleError("no"), 5)
    assert isinstance(outcome, Park)
    assert (outcome.reason, outcome.attempts) == (Reason.REJECTED_BY_RULE, 5)


@given(max_attempts=st.integers(1, 50), delays=st.lists(st.timedeltas(timedelta(0), timedelta(1)), min_size=1))
def test_a_failing_message_is_executed_as_often_as_the_policy_says(max_attempts: int, delays: list[timedelta]) -> None:
    policy = RetryPolicy(max_attempts, tuple(delays))
    executions = 1
    while isinstance(outcome := policy.decide(RuntimeError(), executions), Retry):
        assert outcome.next_attempt == executions + 1
        assert outcome.delay in delays
        executions = outcome.next_attempt
    assert (executions, outcome.attempts) == (max_attempts, max_attempts)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuleError("no"), Reason.REJECTED_BY_RULE),
        (SpecialRuleError("no"), Reason.REJECTED_BY_RULE),
        (PermanentError(Reason.INVALID, "no"), Reason.INVALID),
        (postgres_error("22021"), Reason.INVALID),
        (postgres_error("22001"), Reason.INVALID),
        (postgres_error("22P05"), Reason.INVALID),
        (postgres_error("22003"), Reason.INVALID),
        (postgres_error("23514"), Reason.REJECTED_BY_RULE),
        (postgres_error("23502"), Reason.REJECTED_BY_RULE),
    ],
)
def test_what_waiting_cannot_mend_is_parked_at_the_first_attempt(error: Exception, reason: Reason) -> None:
    outcome = POLICY.decide(error, 1)
    assert isinstance(outcome, Park)
    assert (outcome.reason, outcome.attempts) == (reason, 1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(),
        TimeoutError(),
        HandlerTimeoutError("late"),
        postgres_error("40001"),
        postgres_error("40P01"),
        postgres_error("55P03"),
        postgres_error("23505", "duplicate key value violates unique constraint"),
        postgres_error("23505", "doppelter Schlüsselwert verletzt Unique-Constraint"),
        postgres_error("0A000"),
    ],
)
def test_what_may_pass_is_tried_again_whatever_the_text_says(error: Exception) -> None:
    assert isinstance(POLICY.decide(error, 1), Retry)


@given(st.text("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=3, max_size=3))
def test_every_data_exception_is_an_invalid_message(suffix: str) -> None:
    outcome = POLICY.decide(postgres_error("22" + suffix), 1)
    assert isinstance(outcome, Park)
    assert outcome.reason is Reason.INVALID


@pytest.mark.parametrize("state", [None, 22001, b"22001", ""])
def test_what_is_no_sql_state_decides_nothing(state: Any) -> None:
    error = RuntimeError()
    error.sqlstate = state  # type: ignore[attr-defined]
    assert isinstance(POLICY.decide(error, 1), Retry)
    assert not is_outage(error)


@pytest.mark.parametrize("state", ["08006", "08003", "53300", "57P01", "57P03", "25006"])
def test_a_database_that_is_away_is_an_outage(state: str) -> None:
    assert is_outage(postgres_error(state))


@pytest.mark.parametrize("state", ["57014", "23505", "40001", "22021"])
def test_a_refused_statement_is_no_outage(state: str) -> None:
    assert not is_outage(postgres_error(state))


def test_a_diagnosis_never_quotes_a_payload() -> None:
    secret = "4111-1111-1111-1111"
    try:
        int(secret)
    except ValueError as error:
        diagnosis = diagnose(error)
    assert diagnosis.exception_type == "builtins.ValueError"
    assert diagnosis.explanation.startswith("ValueError at test_retry.py:")
    assert secret not in diagnosis.explanation
    told = diagnose(postgres_error("23505", f"Key (card)=({secret}) already exists"))
    assert told.explanation == "SQL state 23505, constraint some_constraint"


CARD = "4111-1111-1111-1111"


class Payment(BaseModel):
    """A model with a complaint."""

    card: int


def validation_error() -> ValidationError:
    """Return what pydantic says of a wrong payment: its text quotes the value."""
    with pytest.raises(ValidationError) as refused:
        Payment.model_validate({"card": CARD})
    assert CARD in str(refused.value)
    return refused.value


@pytest.mark.parametrize(
    "error",
    [
        KeyError(CARD),
        UnicodeDecodeError("utf-8", CARD.encode(), 0, 1, CARD),
        OSError(2, CARD, CARD),
        ExceptionGroup(CARD, [ValueError(CARD)]),
        validation_error(),
        asyncpg.PostgresError.new({"C": "23505", "M": CARD, "D": f"Key (card)=({CARD}) exists.", "H": CARD, "W": CARD}),
        asyncpg.PostgresError.new({"C": "22P02", "M": f'invalid input syntax for type integer: "{CARD}"'}),
        asyncpg.DataError(f"invalid input for query argument $1: '{CARD}'"),
        asyncpg.InterfaceError(CARD),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_an_exception_quotes_is_in_no_outcome(error: Exception) -> None:
    error.__cause__ = ValueError(CARD)
    error.add_note(CARD)
    assert CARD not in str(POLICY.decide(error, 1))
    assert CARD not in str(POLICY.decide(error, 5))


@given(st.text(min_size=5))
def test_a_diagnosis_tells_type_and_place_only(text: str) -> None:
    try:
        raise RuntimeError(text)  # noqa: TRY301 - it needs a traceback
    except RuntimeError as error:
        diagnosis = diagnose(error)
    assert diagnosis.exception_type == "builtins.RuntimeError"
    assert re.fullmatch(
        r"RuntimeError at test_retry\.py:\d+ in test_a_diagnosis_tells_type_and_place_only", diagnosis.explanation
    )


def test_a_type_that_is_not_called_safe_is_not_quoted() -> None:
    assert diagnose(RuleError(CARD)).explanation == "RuleError"
    assert diagnose(SpecialRuleError(CARD), (RuleError,)).explanation == CARD
    assert diagnose(HandlerTimeoutError("late")).explanation == "late"


def test_a_diagnosis_keeps_texts_written_for_people_within_bounds() -> None:
    assert diagnose(RuleError("the invoice is void"), (RuleError,)).explanation == "the invoice is void"
    assert len(diagnose(RuleError("x" * 5000), (RuleError,)).explanation) == 1000


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("text", ["é" * 5000, "x" + "\U0001f600" * 5000, "\ud800" * 5000, "a\ud800b"])
def test_a_diagnosis_is_bounded_in_bytes_and_can_be_sent(text: str) -> None:
    """Half a character cannot be encoded: the parked copy could never be published, and the delivery stayed held."""
    assert 1 <= len(diagnose(RuleError(text), (RuleError,)).explanation.encode()) <= 1000


@given(failures=st.integers(1, 10_000), jitter=st.floats(0, 1, exclude_max=True))
def test_a_pause_grows_and_stays_within_bounds(failures: int, jitter: float) -> None:
    first, longest = timedelta(seconds=1), timedelta(seconds=60)
    pause = backoff(failures, jitter, first=first, longest=longest)
    assert first <= pause <= longest * 1.25
    assert pause <= backoff(failures + 1, jitter, first=first, longest=longest)


@pytest.mark.parametrize(
    ("failures", "jitter", "seconds"),
    [(0, 0, 1), (1, 0, 1), (2, 0, 2), (3, 0, 4), (6, 0, 32), (7, 0, 60), (10**9, 0, 60), (1, 0.5, 1.125), (7, 0.8, 72)],
)
def test_a_pause_doubles_up_to_the_longest_and_chance_stretches_it(
    failures: int, jitter: float, seconds: float
) -> None:
    pause = backoff(failures, jitter, first=timedelta(seconds=1), longest=timedelta(seconds=60))
    assert pause == timedelta(seconds=seconds)
