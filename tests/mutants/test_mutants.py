"""Every fault of `table.py`, put back, is caught; the same scenarios find nothing wrong with the code as it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.mutants import scenarios, storms, uneven
from tests.mutants.faults import checks_off
from tests.mutants.table import FAULTS, Fault

Programs = dict[str, Any]


@pytest.fixture(scope="module")
def sound() -> dict[bool, Programs]:
    """The programs of the code as it is, by poison mode, and the proof that serving with them shows nothing."""
    programs: dict[bool, Programs] = {True: {}, False: {}}
    for poison in (True, False):
        assert scenarios.serve(programs[poison], poison=poison) == {}
    return programs


def _run(fault: Fault, sound: dict[bool, Programs], enough: set[str]) -> dict[str, str]:
    if fault.scenario is not scenarios.serve:
        return fault.scenario()
    kept = {k: p for k, p in sound[fault.poison].items() if k not in fault.compiled}
    return scenarios.serve(kept, poison=fault.poison, enough=enough)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_behaviour_shows_the_fault(fault, sound, monkeypatch):
    if fault.guarded:
        checks_off(monkeypatch)
    fault.patch(monkeypatch)
    symptoms = _run(fault, sound, fault.seen)
    assert fault.seen <= set(symptoms), symptoms


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.guarded and not f.reshaped], ids=lambda f: f.name
)
def test_the_host_refuses_the_fault(fault, sound, monkeypatch):
    fault.patch(monkeypatch)
    # What is refused never reaches the device, so the sound programs serve until then.
    symptoms = _run(dataclasses.replace(fault, compiled=()), sound, set())
    assert set(symptoms) == {"refused"}, symptoms


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.fork,
        scenarios.shards,
        scenarios.values,
        scenarios.splits,
        storms.storm,
        uneven.uneven,
    ],
    ids=lambda s: s.__name__,
)
def test_the_code_as_it_is_shows_nothing(scenario):
    assert scenario() == {}


def test_without_checks_the_code_as_it_is_shows_nothing(sound, monkeypatch):
    """So what a fault shows with the checks off is the fault's doing."""
    checks_off(monkeypatch)
    assert scenarios.serve(sound[True]) == {}
