"""The audit of compiled kernels: that it sees what it must refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.audit import _cubin, _cuda
from bench.audit._report import Row, table

SASS = """
 Function kernel:
  REG:{registers} STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:576 TEXTURE:0 SURFACE:0 SAMPLER:0

\tcode for sm_90a
\t\tFunction : kernel
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
        /*0010*/              @!P6 LDG.E.{load} R19, desc[UR4][R14.64] ;  /* 0x0000000404047981 */
        /*0020*/                   FADD R4, R4, R5 ;                      /* 0x0000000504047221 */
        /*0030*/              @P0  STG.E.{store} desc[UR4][R14.64], R4 ;  /* 0x0000000404047986 */
{spill}        /*0050*/                   EXIT ;                                 /* 0x000000000000794d */
"""
SPILL = "        /*0040*/                   STL.64 [R1], R4 ;                      /* 0x0000000401007387 */\n"


MORE = "        /*0048*/              @!P6 LDG.E.U16 R19, desc[UR4][R14.64] ;  /* 0x0000000404047981 */\n"


def read(registers=40, load="128", store="128", spill="", more=""):
    (kernel,) = _cubin.parse(SASS.format(registers=registers, load=load, store=store, spill=spill + more))
    row = Row("kernel", "bfloat16", "4096", "sm_90", threads=256)
    row.take(kernel)
    row.check(wide=True, element_bits=16)
    return row


def test_a_good_kernel():
    row = read()
    assert (row.registers, row.spills, row.shared) == (40, 0, 1024)
    assert row.loads == {128: 1} and row.stores == {128: 1} and not row.problems
    assert "| kernel | bfloat16 | 4096 | sm_90 | 256 | 40 | 0 | 1024 | 75 % | 1x128 | 1x128 |" in table([row])


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        ({"spill": SPILL}, "1 accesses to spilled registers"),
        ({"load": "U16"}, "no loads of 128 bits"),
        ({"more": 3 * MORE}, "3 loads of 16 bits or less"),
        ({"store": "64"}, "no stores of 128 bits"),
    ],
)
def test_planted_faults_are_found(planted, problem):
    assert "; ".join(read(**planted).problems) == problem


@pytest.mark.parametrize(
    ("registers", "threads", "share"), [(32, 256, 1.0), (40, 256, 0.75), (255, 128, 0.125), (64, 1024, 0.5)]
)
def test_occupancy(registers, threads, share):
    """As NVIDIA's occupancy calculator has it, for compute capability 9.0."""
    kernel = _cubin.Kernel("kernel", 90, registers=registers)
    assert kernel.occupancy(threads) == share


def test_a_compiled_kernel():
    """One launch of each kind of target through Triton's compiler; in a process of its own, since tests interpret."""
    pytest.importorskip("triton")
    code = (
        "import torch\n"
        "from bench.audit import _triton\n"
        "for target in ('sm_90', 'gfx942'):\n"
        "    (row,) = _triton.run((target, 'silu forward', torch.bfloat16, 4096, True))\n"
        "    assert row.registers and row.loads[128] and row.stores[128] and not row.problems, row\n"
        "    (row,) = _triton.run((target, 'silu forward', torch.bfloat16, 4097, False))\n"
        "    assert not row.loads[128] and not row.problems, row\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_cuda_kernels_are_told_by_their_names():
    bf16 = "pyckpt::cuda::Layout<__nv_bfloat16, 4, true>"
    norm = _cuda.described(
        f"void pyckpt::cuda::norm_forward_kernel<{bf16}, true>(pyckpt::cuda::NormRows<int>)"
    )
    assert (norm.kernel, norm.dtype, norm.shape) == (
        "layer_norm forward",
        "bfloat16",
        "in registers, 4 chunks",
    )
    assert (norm.loads, norm.stores) == (4, 4)
    narrow = _cuda.described(
        "void pyckpt::cuda::softmax_backward_kernel<pyckpt::cuda::Layout<float, 0, false> >(int)"
    )
    assert narrow.shape == "long, element by element" and (narrow.loads, narrow.stores) == (0, 0)
    gelu = _cuda.described(
        "void pyckpt::cuda::vector_kernel<float, pyckpt::cuda::DenseView<float, 3>, "
        "pyckpt::cuda::Backward<pyckpt::GeluErf> >(int)"
    )
    assert (gelu.kernel, gelu.shape, gelu.loads, gelu.stores) == ("GeluErf backward", "dense", 4, 2)


def test_attention_is_held_to_its_tiles():
    """64 queries and 32 keys of width 128: in each of 4 warps 4 tiles x 8 steps for S and for dP, 16 x 2 for the other two."""
    what = _cuda.described(
        "void pyckpt::cuda::attention_queries_kernel<__nv_bfloat16, 128, true>(pyckpt::cuda::AttentionCall<int>)"
    )
    assert (what.kernel, what.dtype, what.shape) == (
        "attention backward, queries",
        "bfloat16",
        "width 128, dropout",
    )
    assert what.products == 4 * 32 and (what.loads, what.stores) == (32, 8)
    assert what.shared == (2 * 64 + 4 * 32) * (128 + 8) * 2
    few = SASS.format(registers=40, load="128", store="128", spill="").replace(
        "FADD R4", "HMMA.16816.F32.BF16 R4"
    )
    (kernel,) = _cubin.parse(few)
    what = _cuda.Described("kernel", "bfloat16", "", 128, products=2)
    assert _cuda._row(what, kernel, "sm_90").problems == ["1 products on tensor cores instead of 2"]


def test_a_narrowed_cuda_kernel_fails():
    (kernel,) = _cubin.parse(SASS.format(registers=40, load="128", store="64", spill=""))
    what = _cuda.Described("kernel", "bfloat16", "dense", 256, loads=1, stores=1)
    assert _cuda._row(what, kernel, "sm_90").problems == ["0 stores of 128 bits instead of 1"]
