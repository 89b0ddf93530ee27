"""Every op x backend x dtype against the oracle: outputs and every gradient, on random and on hard inputs."""

import pytest
import torch

from tests._ops import CASES, INPUTS, compare
from tests._oracle import DTYPES

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("kind", INPUTS)
@every_dtype
@every_case
def test_accuracy(case, dtype, kind, backend):
    # The interpreter's time goes by calls, not by elements; in float64, where eager is as good, much depends on the draws.
    fewer = backend == "triton_interpreted" and dtype != torch.float64
    shape, draws = ((6, 7, 24), 5) if fewer else ((3, 7, 24), 10)
    compare(case, lambda: INPUTS[kind](shape), dtype, draws, what=kind)


@every_dtype
@every_case
def test_accuracy_on_every_instruction_set(case, dtype, isa):
    for shape in ((9, 203), (2, 2, 64)):
        compare(
            case,
            lambda shape=shape: torch.randn(shape, dtype=torch.float64),
            dtype,
            draws=20,
            what=f"{isa} {shape}",
        )


@pytest.mark.parametrize("shape", [(1,), (5, 1), (1, 65), (3, 4100), (300, 130)], ids=str)
@every_case
def test_sizes(case, shape, backend):
    if case.causal:
        shape = shape if len(shape) > 1 else (1, *shape)
    # Few rows need many draws: how well eager does in its worst one is a matter of luck.
    rows = torch.Size(shape[:-1]).numel()
    draws = max(3, min(8 if backend == "triton_interpreted" else 20, 100 // rows))
    compare(case, lambda: torch.randn(shape, dtype=torch.float64), torch.float32, draws, what=str(shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@every_case
def test_long_rows_and_many_rows(case, dtype, backend):
    many = 1027 if backend == "triton_interpreted" else 131073
    shapes = [(3, 65537)] if case.masked else [(3, 65537), (many, 3)]
    for shape in shapes:
        compare(
            case, lambda shape=shape: torch.randn(shape, dtype=torch.float64), dtype, draws=1, what=str(shape)
        )
