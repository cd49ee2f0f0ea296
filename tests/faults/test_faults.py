# SPDX-License-Identifier: Apache-2.0
"""A handful of faults on real runs, one of each sort."""

import json

import pytest

from tests.faults import campaign, disks, judge
from tests.faults.campaign import Campaign
from tests.faults.faults import OF_A_DISK, Fault
from tests.faults.layouts import STEPS
from tests.faults.starts import COMMAND


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    folder = tmp_path_factory.mktemp("faults")
    return Campaign(folder, folder / "faults.csv", keep=True)


QUICK = [
    Fault("one", "exception", "in a save", 0),
    Fault("tp2-sp", "sigkill", "twice in a row", 0),
    Fault("pp2", "sigterm", "random", 0, then="one"),
    Fault("cp2", "sigsegv", "in a resume", 0),
    Fault("dp2", "full-disk", "in a save", 0),
    Fault("dp2", "sigkill", "last step", 0),
    Fault("ep2", "rerun", "random", 0),
    Fault("one", "sigkill", "in a save", 0, COMMAND),
]


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_a_run_goes_on_as_if_nothing_had_been(fault: Fault, bench: Campaign) -> None:
    if fault.kind in OF_A_DISK and not disks.are_allowed():
        pytest.skip("only root may mount a small disk here")
    (found,) = bench.run([fault])
    assert not found.wrong, (found, bench.work)
    if fault.then:  # a step less, and it would be reported
        digests = json.loads((bench.work / "undisturbed" / fault.layout / campaign._DIGESTS).read_text())
        output = bench.work / "runs" / fault.name / "output"
        before = output / "checkpoints" / f"iter_{STEPS - 1:07d}"
        if before.is_dir():
            last = judge.newest(bench.work / "undisturbed" / fault.layout / "output")
            assert judge.distance(last, before) > judge.ROUNDING and digests
