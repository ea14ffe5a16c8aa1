"""G8: the search of tests/integration/test_many_relays.py, for longer."""

import pytest

from tests.support.relay_search import look_for_a_violation


@pytest.mark.guarantee("G8")
def test_hundreds_of_stories_lead_to_no_violation(template: str) -> None:
    look_for_a_violation(template, examples=400, the_same_each_time=False)
