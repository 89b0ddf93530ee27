"""The recompute engine on a model's forward, by forward hooks: they survive deepcopy, pickle and DataParallel's replicas."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from .engine import Policy, enter, leave


class _Begin:
    """The hook that begins a region of this policy."""

    def __init__(self, policy: str | Policy):
        self.policy = policy

    def __call__(self, module: nn.Module, args: Any) -> None:
        frame = None if torch.compiler.is_compiling() else sys._getframe(1)
        enter(self.policy, False, module, frame=frame)


def _end(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        leave(module, failed=sys.exc_info()[0] is not None)


def installed(module: nn.Module) -> str | Policy | None:
    """The policy of the region on the module's forward."""
    hooks = module._forward_pre_hooks.values()
    return next((hook.policy for hook in hooks if type(hook) is _Begin), None)


def install(module: nn.Module, policy: str | Policy = "pointwise") -> None:
    """In place of a region of another policy."""
    if installed(module) != policy:
        uninstall(module)
        module.register_forward_pre_hook(_Begin(policy), prepend=True)
        module.register_forward_hook(_end, always_call=True)


def uninstall(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if type(hook) is _Begin or hook is _end]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
