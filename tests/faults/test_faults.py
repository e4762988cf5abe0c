"""Processes that are killed, disks that are full, bytes that are flipped: a little of `make faults`."""

import json

import pytest

from tests.faults.damage import KINDS, Kind, damage
from tests.faults.disks import Disks
from tests.faults.reruns import Reruns
from tests.faults.scenarios import KEPT, SCENARIOS, prepare
from tests.faults.server import Server


@pytest.fixture(scope="module")
def server():
    found = Server()
    yield found
    found.close()


class Faults(Reruns, Disks):
    """All that can be done to a command."""


@pytest.fixture(scope="module", params=SCENARIOS, ids=lambda scenario: scenario.name)
def faults(request, server, tmp_path_factory):
    return Faults(server, prepare(tmp_path_factory.mktemp("faults") / "given"), request.param)


def test_a_command_that_was_killed_resumes_and_loses_nothing(faults):
    faults.at_random(1)
    faults.at_writes([3], ("half",))
    assert faults.counts["killed"] >= 2
    assert faults.counts["resumed to the same result"] >= 2


def test_a_full_disk_is_one_line_and_former_files_stay(faults):
    """Here a limit on the size of files; `make faults` mounts disks."""
    assert faults.full_outputs([1000], limit=True)["refused by name, former files intact"] == 1


def test_damaged_results_are_measured_and_written_again(faults):
    again = faults.damage_kept if KEPT in faults.scenario.arguments else faults.damage_run
    assert again(1)["runs with the same result"] == 1


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_damaged_bytes_are_never_believed(kind, tmp_path):
    found = damage(kind, tmp_path, 80)
    assert found["damaged"] > 70
    assert found["refused by name"] + found["measured again"] > 0.9 * found["damaged"]


def test_a_file_without_a_checksum_is_caught(tmp_path):
    """The negative control: the same damage in JSON that nobody checks is believed."""

    def make(folder):
        (folder / "plain.json").write_text(json.dumps({"value": 1234567890, "other": [1, 2, 3]}, indent=1))
        return folder / "plain.json"

    def read(path):
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None

    with pytest.raises(AssertionError, match="believed"):
        damage(Kind("plain", make, read), tmp_path, 160)
