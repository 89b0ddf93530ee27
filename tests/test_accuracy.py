"""Every op x backend x dtype against the oracle: outputs and every gradient, on random and on hard inputs."""

import pytest
import torch

from tests._ops import CASES, INPUTS, compare
from tests._oracle import DTYPES

IDS = [case.name for case in CASES]


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_accuracy(case, dtype, kind, backend):
    x = INPUTS[kind]((3, 7, 24)).to(dtype)
    grad = torch.randn(x.shape, dtype=torch.float64).to(dtype)
    compare(case, x, grad, what=kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_accuracy_on_every_instruction_set(case, dtype, isa):
    for shape in ((9, 203), (2, 2, 64)):
        x = torch.randn(shape, dtype=torch.float64).to(dtype)
        compare(case, x, torch.randn(shape, dtype=torch.float64).to(dtype), what=isa)


@pytest.mark.parametrize("shape", [(1,), (5, 1), (1, 65), (3, 4100), (300, 130)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_sizes(case, shape, backend):
    if "causal" in case.name or "bottom" in case.name:
        shape = shape if len(shape) > 1 else (1, *shape)
    x = torch.randn(shape)
    compare(case, x, torch.randn(shape), what=str(shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_long_rows_and_many_rows(case, dtype, backend):
    shapes = [(3, 65537)] if "softmax_" in case.name else [(3, 65537), (131073, 3)]
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64).to(dtype)
        compare(case, x, torch.randn(shape, dtype=torch.float64).to(dtype), what=str(shape))
