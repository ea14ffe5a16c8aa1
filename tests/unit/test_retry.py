"""What a failure leads to."""

from datetime import timedelta

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_the_last_attempt_parks() -> None:
    outcome = POLICY.decide(RuntimeError(), 5)
    assert isinstance(outcome, Park)
    assert (outcome.reason, outcome.attempts) == (Reason.ATTEMPTS_EXHAUSTED, 5)


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


def test_a_diagnosis_keeps_texts_written_for_people_within_bounds() -> None:
    assert diagnose(RuleError("the invoice is void"), (RuleError,)).explanation == "the invoice is void"
    assert len(diagnose(RuleError("x" * 5000), (RuleError,)).explanation) == 1000


@given(failures=st.integers(1, 10_000), jitter=st.floats(0, 1, exclude_max=True))
def test_a_pause_grows_and_stays_within_bounds(failures: int, jitter: float) -> None:
    first, longest = timedelta(seconds=1), timedelta(seconds=60)
    pause = backoff(failures, jitter, first=first, longest=longest)
    assert first <= pause <= longest * 1.25
    assert pause <= backoff(failures + 1, jitter, first=first, longest=longest)
