"""The rule that judges claims."""

import math

import pytest
from betternorm_lab.experiments import claims
from betternorm_lab.results import Outcome, Verdict

REPLICATED, OPPOSITE, NEGLIGIBLE = Outcome.REPLICATED, Outcome.OPPOSITE, Outcome.NEGLIGIBLE
EQUIVALENT, INCONCLUSIVE = Outcome.EQUIVALENT, Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("interval", "claimed", "outcome"),
    [
        ((0.1, 2.0), claims.MORE, REPLICATED),
        ((0.1, 0.4), claims.MORE, NEGLIGIBLE),
        ((0.1, 0.4), claims.LESS, NEGLIGIBLE),
        ((-2.0, -0.1), claims.MORE, OPPOSITE),
        ((-0.1, 2.0), claims.MORE, INCONCLUSIVE),
        ((-0.1, 0.4), claims.MORE, EQUIVALENT),
        ((0.0, 0.0), claims.MORE, EQUIVALENT),
        ((-2.0, -0.1), claims.LESS, REPLICATED),
        ((0.1, 2.0), claims.LESS, OPPOSITE),
        ((-0.4, 0.3), claims.within(0.5), REPLICATED),
        ((0.6, 0.9), claims.within(0.5), OPPOSITE),
        ((0.4, 0.9), claims.within(0.5), INCONCLUSIVE),
        ((-3.0, 0.4), claims.at_most(0.5), REPLICATED),
        ((-3.0, 0.6), claims.at_most(0.5), INCONCLUSIVE),
        ((0.6, 0.9), claims.at_most(0.5), OPPOSITE),
        ((math.nan, math.nan), claims.MORE, INCONCLUSIVE),
    ],
)
def test_a_claim_comes_to_what_the_interval_says(interval, claimed, outcome):
    assert claims.judge("claim", interval, claimed, "", margin=0.5).outcome is outcome


def test_two_arms_apart_are_seen_apart_and_few_runs_tell_nothing():
    assert claims.compare("more", [3.0, 3.1, 2.9], [1.0, 1.1, 0.9]).outcome is REPLICATED
    assert claims.compare("more", [1.0, 1.1, 0.9], [3.0, 3.1, 2.9]).outcome is OPPOSITE
    assert claims.compare("more", [3.0], [1.0, 1.1]).outcome is Outcome.NOT_TESTED
    assert "two of each are needed" in claims.compare("more", [], [1.0, 1.1]).evidence


def test_pairs_decide_what_the_spread_between_networks_hides():
    before, after = [40.0, 50.0, 60.0], [41.0, 51.1, 60.9]
    assert claims.compare("more", after, before).outcome is INCONCLUSIVE
    assert claims.compare("more", after, before, paired=True).outcome is REPLICATED


def test_a_verdict_has_the_minimum_detectable_effect():
    found = claims.compare("more", [3.0, 3.4], [1.0, 1.4])
    assert found.detectable > 0.4
    assert f"minimum detectable effect {found.detectable:.2g}" in found.evidence
    assert claims.compare("more", [3.0, 3.1, 2.9], [1.0, 1.1, 0.9]).detectable < found.detectable


def test_p_values_are_corrected_for_the_claims_of_a_page_that_have_one():
    found = claims.corrected(
        [
            claims.compare("more", [3.0, 3.1, 2.9], [1.0, 1.1, 0.9]),
            claims.compare("no difference", [1.0, 1.1, 0.9], [1.0, 1.1, 0.9], claims.within(1.0)),
            claims.compare("more", [1.0, 1.2, 0.9], [1.0, 1.1, 0.9]),
        ]
    )
    assert [" Holm's P = " in one.evidence for one in found] == [True, False, True]
    assert found[0].evidence.endswith(f"Holm's P = {2 * found[0].p:.3g}")


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ((REPLICATED, REPLICATED), REPLICATED),
        ((REPLICATED, INCONCLUSIVE), INCONCLUSIVE),
        ((INCONCLUSIVE, OPPOSITE), OPPOSITE),
        ((REPLICATED, EQUIVALENT), EQUIVALENT),
    ],
)
def test_a_claim_of_parts_holds_where_all_parts_do(parts, outcome):
    verdicts = [Verdict("part", part, "") for part in parts]
    assert claims.together("whole", verdicts).outcome is outcome


def test_numbers_have_as_many_places_as_their_interval_needs():
    points = claims.compare("points", [50.1, 51.2, 50.6], [48.0, 48.9, 48.4])
    assert "50.63 ± 0.55 (n = 3) against 48.43 ± 0.45 (n = 3): difference +2.20 [" in points.evidence
    nats = claims.compare("nats", [1.8012, 1.8103, 1.8055], [1.8110, 1.8204, 1.8151], paired=True)
    assert "1.8057 ± 0.0046 (n = 3) against 1.8155 ± 0.0047 (n = 3): difference -0.0098 [" in nats.evidence
    assert nats.measured.startswith("-0.0098 [")
