"""The recompute engine on a model's forward, by forward hooks: they survive deepcopy, pickle and DataParallel's replicas."""

import sys
from typing import Any

import torch
from torch import nn

from .engine import enter, leave


def _begin(module: nn.Module, args: Any) -> None:
    enter("pointwise", False, module, frame=None if torch.compiler.is_compiling() else sys._getframe(1))


def _end(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        leave(module, failed=sys.exc_info()[0] is not None)


def installed(module: nn.Module) -> bool:
    return _begin in module._forward_pre_hooks.values()


def install(module: nn.Module) -> None:
    if not installed(module):
        module.register_forward_pre_hook(_begin, prepend=True)
        module.register_forward_hook(_end, always_call=True)


def uninstall(module: nn.Module) -> None:
    for hooks, hook in ((module._forward_pre_hooks, _begin), (module._forward_hooks, _end)):
        for key in [key for key, value in hooks.items() if value is hook]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
