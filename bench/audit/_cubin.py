"""What compiled NVIDIA kernels use, read from their machine code: registers, stack, spills, shared memory, access widths.

Works on whatever cuobjdump reads: a cubin, an object file, a shared library with device code. cuobjdump disassembles through
nvdisasm; both are part of the CUDA toolkit and of the triton wheel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path

# Per multiprocessor, by compute capability: threads, blocks, bytes of shared memory (CUDA C++ Programming Guide, "Technical
# specifications per compute capability"). Registers are 65536 on all of them.
LIMITS = {
    80: (2048, 32, 164 << 10),
    86: (1536, 16, 100 << 10),
    89: (1536, 24, 100 << 10),
    90: (2048, 32, 228 << 10),
    100: (2048, 32, 228 << 10),
    120: (1536, 24, 100 << 10),
}
REGISTERS = 65536
REGISTER_UNIT = 256  # a warp's registers are allotted in steps of this many
RESERVED_SHARED = 1 << 10  # of each block, by the system


@dataclass
class Kernel:
    """One kernel for one architecture.

    `loads` and `stores` count instructions on global memory by their width in bits, asynchronous copies to shared memory among
    the loads; `shared` is static shared memory in bytes; `spill_loads` and `spill_stores` are accesses to local memory, which a
    kernel without arrays makes only to spill registers; `matrix` counts instructions of tensor cores, `group_matrix` those of
    four warps together.
    """

    name: str
    arch: int
    registers: int = 0
    stack: int = 0
    shared: int = 0
    spill_loads: int = 0
    spill_stores: int = 0
    instructions: int = 0
    matrix: int = 0
    group_matrix: int = 0
    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)

    def occupancy(self, threads: int, dynamic_shared: int = 0) -> float:
        """Share of a multiprocessor's warps that can be resident with blocks of `threads` threads."""
        most_threads, blocks, shared = LIMITS[self.arch]
        warps = -(-threads // 32)
        per_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        # Registers are held by four partitions, each with a quarter of them; a block's warps are dealt out in turn.
        by_registers = 4 * (REGISTERS // 4 // max(per_warp, 1)) // warps
        by_shared = shared // (self.shared + dynamic_shared + RESERVED_SHARED)
        resident = min(blocks, most_threads // (32 * warps), by_registers, by_shared)
        return resident * warps / (most_threads // 32)


def find_tool(name: str) -> str:
    """Path of a CUDA binary utility: from PATH, or from the triton wheel. RuntimeError where there is none."""
    if path := shutil.which(name):
        return path
    triton = util.find_spec("triton")
    for folder in triton.submodule_search_locations or [] if triton else []:
        path = Path(folder, "backends", "nvidia", "bin", name)
        if path.exists():
            return str(path)
    raise RuntimeError(f"{name} is neither in PATH nor in an installed triton: pip install triton")


_ARCH = re.compile(r"^\s*(?:code for|arch =) sm_(\d+)[a-z]?\s*$")
_FUNCTION = re.compile(r"^\s*Function\s*:\s*(\S+)")
_USAGE = re.compile(r"^\s*Function (\S+):\s*$")
_FIELDS = re.compile(r"(REG|STACK|SHARED):(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


def _width(opcode: str) -> int:
    """Bits that a load or store moves per thread, from the suffixes of its opcode."""
    for suffix in opcode.split(".")[1:]:
        if suffix in ("64", "128", "256"):
            return int(suffix)
        if suffix in ("U8", "S8"):
            return 8
        if suffix in ("U16", "S16"):
            return 16
    return 32


# Of a warp, of a group of four, of float64, of compute capability 10.
_MATRIX = ("HMMA", "HGMMA", "DMMA", "UTCHMMA")


def _count(kernel: Kernel, opcode: str) -> None:
    kernel.instructions += 1
    base = opcode.partition(".")[0]
    if base in ("LDG", "LD", "LDGSTS"):  # LD: an address whose space the compiler could not tell
        kernel.loads[_width(opcode)] += 1
    elif base in ("STG", "ST"):
        kernel.stores[_width(opcode)] += 1
    elif base == "LDL":
        kernel.spill_loads += 1
    elif base == "STL":
        kernel.spill_stores += 1
    elif base in _MATRIX:
        kernel.matrix += 1
        kernel.group_matrix += base == "HGMMA"


def parse(text: str) -> Iterator[Kernel]:
    """The kernels in the output of ``cuobjdump -sass -res-usage``."""
    found: dict[tuple[str, int], Kernel] = {}
    arch, current = 0, None
    for line in text.splitlines():
        if match := _ARCH.match(line):
            arch = int(match[1])
            for key in [
                key for key in found if not key[1]
            ]:  # of a bare cubin, the usage comes before the architecture
                kernel = found.pop(key)
                kernel.arch = arch
                found[key[0], arch] = kernel
        elif match := _FUNCTION.match(line) or _USAGE.match(line):
            current = found.setdefault((match[1], arch), Kernel(match[1], arch))
        elif current is None:
            continue
        elif "REG:" in line:
            values = {key: int(value) for key, value in _FIELDS.findall(line)}
            current.registers, current.stack = values["REG"], values["STACK"]
            current.shared = values["SHARED"]
        elif match := _INSTRUCTION.match(line):
            _count(current, match[1])
    yield from found.values()


def read(path: str | Path) -> list[Kernel]:
    """The kernels in a cubin, an object file or a shared library, one for each architecture it was compiled for."""
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    environment = {"PATH": f"{Path(nvdisasm).parent}:{Path(cuobjdump).parent}:/usr/bin:/bin"}
    command = [cuobjdump, "-sass", "-res-usage", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    kernels = list(parse(done.stdout))
    if not kernels or not all(kernel.instructions and kernel.registers for kernel in kernels):
        raise RuntimeError(f"{' '.join(command)} showed no kernel, or one without code or resource usage")
    return kernels
