"""The entry that users call."""

import pytest

from lifetime import Hardware, StorageKind
from teraio.errors import ConfigError, InfeasibleBudgetError
from teraio.planner import plan, simulate


def test_plan_fits_and_predicts_what_simulating_it_gives(hill, disk):
    made = plan(hill, budget=100, hardware=disk, min_nbytes=1)
    result = simulate(hill, made, disk)
    assert (made.policy, made.signature, made.budget_nbytes) == ("planned", hill.signature, 100)
    assert made.predicted.peak_nbytes == result.peak_nbytes == 100
    assert made.predicted.step_s == result.step_s
    assert made.predicted.stall_s == result.stall_s
    assert made.predicted.written_nbytes == made.offloaded_nbytes == 100


def test_budget_is_a_size(hill, disk):
    assert plan(hill, budget="1KiB", hardware=disk).budget_nbytes == 1024


def test_default_hardware_is_enough(hill):
    assert simulate(hill, plan(hill, budget=100, min_nbytes=1)).peak_nbytes == 100


def test_small_storages_stay_by_default(hill, disk):
    with pytest.raises(InfeasibleBudgetError):
        plan(hill, budget=100, hardware=disk)


@pytest.mark.parametrize("policy", ["planned", "evict_all"])
def test_below_the_floor_the_floor_is_named(hill, disk, policy):
    with pytest.raises(InfeasibleBudgetError, match="100 B") as caught:
        plan(hill, budget=99, hardware=disk, policy=policy, min_nbytes=1)
    assert caught.value.floor_nbytes == 100


def test_keep_below_the_peak_does_not_fit(hill, disk):
    with pytest.raises(InfeasibleBudgetError, match="'keep' needs 200 B"):
        plan(hill, budget=199, hardware=disk, policy="keep", min_nbytes=1)


def test_keep_at_the_peak_fits(hill, disk):
    assert plan(hill, budget=200, hardware=disk, policy="keep").moves == ()


@pytest.mark.parametrize("kinds", ["auto", "activation", {"activation"}, ["activation"]])
def test_kinds_that_move(hill, disk, kinds):
    assert plan(hill, budget=100, hardware=disk, kinds=kinds, min_nbytes=1).moves


@pytest.mark.parametrize("kinds", ["parameter", {"activation", "optimizer"}, set()])
def test_other_kinds_are_refused(hill, disk, kinds):
    with pytest.raises(ConfigError, match="kinds"):
        plan(hill, budget=100, hardware=disk, kinds=kinds)


def test_host_tier_is_refused(hill, disk):
    with pytest.raises(ConfigError, match="host_budget"):
        plan(hill, budget=100, hardware=disk, host_budget="1GiB")


def test_unknown_policy_is_refused(hill, disk):
    with pytest.raises(ConfigError, match="policy"):
        plan(hill, budget=100, hardware=disk, policy="clairvoyant")


def test_plan_of_another_trace_is_not_simulated(hill, disk, script):
    weight = script.storage(10, StorageKind.PARAMETER, older=True)
    script.tick()
    script.op(uses=[weight])
    with pytest.raises(ConfigError, match="another trace"):
        simulate(script.trace(), plan(hill, budget=200, hardware=disk), disk)


def test_slower_disk_is_predicted_to_take_longer(hill):
    steps = [plan(hill, budget=100, hardware=Hardware(s, s), min_nbytes=1).predicted.step_s for s in (400.0, 50.0)]
    assert steps[0] < steps[1]
