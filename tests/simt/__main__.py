"""``python -m tests.simt [fast] [check]``: builds csrc/cuda for the CPU."""

import sys

from .build import FLAVOURS, build

for flavour in sys.argv[1:] or FLAVOURS:
    print(build(flavour))
