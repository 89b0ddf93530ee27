"""Data, sharded and tensor parallel training on two processes: see _distributed.py."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="built without torch.distributed"
)

SCENARIOS = [
    *("ddp", "ddp_accumulates_without_sync", "ddp_of_a_converted_model"),
    *("fsdp2_units", "fsdp2_parameters_are_given_back", "fsdp2_accumulates", "fsdp2_mixed_precision"),
    *("fsdp2_wrapped_before_and_after_conversion", "fsdp2_checkpointed_blocks"),
    *("fsdp2_state_of_a_converted_model", "fsdp1"),
    *("tensor_parallel_blocks", "dtensor_activations", "dtensor_that_from_local_made_the_same"),
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """{scenario: what failed in it, in either process}. One run for all: most of its time goes into starting two processes."""
    command = [sys.executable, "-m", "tests._distributed", str(tmp_path_factory.mktemp("ranks") / "store")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    found = {}
    for output in outputs:
        for line in output.splitlines():
            if line.startswith('{"scenario"'):
                result = json.loads(line)
                found[result["scenario"]] = found.get(result["scenario"], "") + result["failure"]
    return found, "\n".join(outputs)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, outcome):
    found, output = outcome
    assert name in found, f"it did not run\n{output}"
    assert not found[name], found[name]


def test_every_scenario_is_listed(outcome):
    assert list(outcome[0]) == SCENARIOS
