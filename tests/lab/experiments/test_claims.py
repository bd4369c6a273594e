"""The rule that judges claims."""

import math

import pytest

from betternorm.lab.experiments import claims
from betternorm.lab.results import Outcome, Verdict

SEEN, NOT_SEEN, UNDECIDED = Outcome.SEEN, Outcome.NOT_SEEN, Outcome.UNDECIDED


@pytest.mark.parametrize(
    ("interval", "claimed", "outcome"),
    [
        ((0.1, 2.0), claims.MORE, SEEN),
        ((-2.0, -0.1), claims.MORE, NOT_SEEN),
        ((-0.1, 2.0), claims.MORE, UNDECIDED),
        ((0.0, 0.0), claims.MORE, NOT_SEEN),
        ((-2.0, -0.1), claims.LESS, SEEN),
        ((0.1, 2.0), claims.LESS, NOT_SEEN),
        ((-0.4, 0.3), claims.within(0.5), SEEN),
        ((0.6, 0.9), claims.within(0.5), NOT_SEEN),
        ((0.4, 0.9), claims.within(0.5), UNDECIDED),
        ((math.nan, math.nan), claims.MORE, UNDECIDED),
    ],
)
def test_a_claim_is_seen_where_the_interval_lies_inside_and_not_seen_where_it_lies_outside(interval, claimed, outcome):
    assert claims.judge("claim", interval, claimed, "").outcome is outcome


def test_two_arms_apart_are_seen_apart_and_few_runs_decide_nothing():
    assert claims.compare("more", [3.0, 3.1, 2.9], [1.0, 1.1, 0.9]).outcome is SEEN
    assert claims.compare("more", [1.0, 1.1, 0.9], [3.0, 3.1, 2.9]).outcome is NOT_SEEN
    assert claims.compare("more", [3.0], [1.0, 1.1]).outcome is UNDECIDED
    assert "it takes two" in claims.compare("more", [], [1.0, 1.1]).evidence


def test_pairs_decide_what_the_spread_between_networks_hides():
    before, after = [40.0, 50.0, 60.0], [41.0, 51.1, 60.9]
    assert claims.compare("more", after, before).outcome is UNDECIDED
    assert claims.compare("more", after, before, paired=True).outcome is SEEN


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [((SEEN, SEEN), SEEN), ((SEEN, UNDECIDED), UNDECIDED), ((UNDECIDED, NOT_SEEN), NOT_SEEN)],
)
def test_a_claim_of_parts_holds_where_all_parts_do(parts, outcome):
    verdicts = [Verdict("part", part, "") for part in parts]
    assert claims.together("whole", verdicts).outcome is outcome
