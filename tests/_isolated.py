"""Cases in which a fault may corrupt memory, each in a process of its own: `python -m tests._isolated [slow]` prints JSON."""

import contextlib
import json
import os
import sys
import traceback

import torch

import pyckpt
import pyckpt.nn as fused
from tests._layers import COLUMNS, LAYERS, ScaledSoftmax, assert_close, gradients, perturb

C = 8


def _x(*shape, dtype=torch.float32):
    return torch.linspace(-2, 2, torch.Size(shape).numel(), dtype=torch.float64).to(dtype).reshape(shape)


def _refused(name, make):
    def case():
        try:
            getattr(torch.ops.pyckpt, name)(*make())
        except (RuntimeError, TypeError, ValueError):
            return
        # The reference is plain PyTorch: it may broadcast or promote what it is given, and misreads nothing.
        assert pyckpt.backends.select("cpu") == "reference", "accepted"

    return case


def _seed():
    return torch.tensor([7], dtype=torch.int64)


# The operators are public: no argument may make a kernel read outside its buffers or misread a dtype.
RAW = {
    "gelu_bwd: gradient smaller than x": ("gelu_bwd", lambda: (_x(2), _x(64, C), "none")),
    "silu_bwd: gradient of another dtype": ("silu_bwd", lambda: (_x(2, C, dtype=torch.float64), _x(2, C))),
    "gelu_fwd: unknown approximation": ("gelu_fwd", lambda: (_x(2, C), "erf")),
    "relu_fwd: integers": ("relu_fwd", lambda: (_x(2, C).long(),)),
    "dropout: narrow seed": ("dropout", lambda: (_x(2, C), torch.ones(1, dtype=torch.int32), 0.5)),
    "dropout: empty seed": ("dropout", lambda: (_x(2, C), torch.ones(0, dtype=torch.int64), 0.5)),
    "dropout: probability above 1": ("dropout", lambda: (_x(2, C), _seed(), 1.5)),
    "layer_norm_fwd: short weight": ("layer_norm_fwd", lambda: (_x(2, C), [C], _x(2), None, 1e-5)),
    "layer_norm_fwd: short bias": ("layer_norm_fwd", lambda: (_x(2, C), [C], _x(C), _x(2), 1e-5)),
    "layer_norm_fwd: weight and bias of two dtypes": (
        "layer_norm_fwd",
        lambda: (_x(2, C, dtype=torch.bfloat16), [C], _x(C), _x(C, dtype=torch.bfloat16), 1e-5),
    ),
    "layer_norm_fwd: weight on meta": (
        "layer_norm_fwd",
        lambda: (_x(2, C), [C], _x(C).to("meta"), None, 1e-5),
    ),
    "rms_norm_fwd: weight of a narrow dtype": (
        "rms_norm_fwd",
        lambda: (_x(2, C), [C], _x(C, dtype=torch.half), 1e-5),
    ),
    "rms_norm_fwd: another shape": ("rms_norm_fwd", lambda: (_x(2, C), [C + 1], None, 1e-5)),
    "rms_norm_fwd: shape of more dimensions": ("rms_norm_fwd", lambda: (_x(2, C), [3, 2, C], None, 1e-5)),
    "rms_norm_recompute: few statistics": ("rms_norm_recompute", lambda: (_x(2, C), [C], None, _x(1, 1))),
    "rms_norm_bwd: statistics of another dtype": (
        "rms_norm_bwd",
        lambda: (
            _x(2, C),
            _x(2, C),
            [C],
            None,
            _x(1, 2, dtype=torch.float64),
            1e-5,
            False,
            [True, False, False],
        ),
    ),
    "layer_norm_bwd: short gradient": (
        "layer_norm_bwd",
        lambda: (_x(1, C), _x(64, C), [C], None, _x(3, 64), 1e-5, False, [True, True, True]),
    ),
    "softmax_fwd: short mask": ("softmax_fwd", lambda: (_x(2, C), _x(3) > 0, 1.0, None, 0.0, None)),
    "softmax_fwd: integer mask": ("softmax_fwd", lambda: (_x(2, C), _x(C).char(), 1.0, None, 0.0, None)),
    "softmax_fwd: mask of a narrow dtype": (
        "softmax_fwd",
        lambda: (_x(2, C), _x(C).half(), 1.0, None, 0.0, None),
    ),
    "softmax_fwd: dropout without seed": ("softmax_fwd", lambda: (_x(2, C), None, 1.0, None, 0.5, None)),
    "softmax_bwd: smaller gradient": ("softmax_bwd", lambda: (_x(1, 2), _x(64, C), False, 1.0)),
    "softmax_recompute: few statistics": (
        "softmax_recompute",
        lambda: (_x(2, C), None, 1.0, None, 0.0, None, _x(2, 1)),
    ),
}


def _unpacked_as_half(layer):
    """A saved-tensor hook that forgets to convert back: an error or right numbers, never other memory."""

    def case():
        module = perturb(layer.ours())
        x = _x(2, 5, COLUMNS)
        plain = gradients(module, x)
        x.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.half() if t.is_floating_point() else t, lambda t: t
        ):
            torch.manual_seed(0)
            y = module(x)
        try:
            dx = torch.autograd.grad(y, x, torch.linspace(-1, 2, y.numel()).reshape(y.shape))
        except (RuntimeError, TypeError):
            return
        assert_close(dx, plain[1:2], rtol=2e-2, atol=2e-2)

    return case


def _default_device(layer):
    """Temporaries follow the arguments' device, not the default one."""

    def case():
        module = perturb(layer.ours())
        x = _x(2, 5, COLUMNS)
        grad = x + 1
        plain = gradients(module, x, grad)
        with torch.no_grad():
            torch.manual_seed(0)
            y = module(x)
        with torch.device("meta"):
            assert_close(gradients(module, x, grad), plain, rtol=0, atol=0)
            torch.manual_seed(0)
            with torch.no_grad():
                assert_close([module(x)], [y], rtol=0, atol=0)

    return case


def _compiled_backward(make, columns=1024):
    """Dynamo may run the frames of an eager backward: a buffer has to live until the kernel that was given its address
    returns. With MALLOC_MMAP_THRESHOLD_ below the size of these, a freed one is unmapped at once."""

    def case():
        from torch._dynamo import compiled_autograd

        module = make(columns)
        x, grad = _x(columns, 4).t(), _x(4, columns, 2)[..., 0]
        plain = gradients(module, x, grad)
        leaf = x.detach().requires_grad_()
        torch.manual_seed(0)
        y = module(leaf)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(grad)
        assert_close([leaf.grad, *(p.grad for p in module.parameters())], plain[1:])

    return case


def _eager_forward_compiled_step(make, columns=1024):
    """The same without compiled autograd: forward kept out of the compiler, backward called within a compiled function."""

    def case():
        module = make(columns)
        x, grad = _x(columns, 4).t(), _x(4, columns, 2)[..., 0]
        plain = gradients(module, x, grad)
        leaf = x.detach().requires_grad_()
        forward = torch.compiler.disable(module.forward)

        @torch.compile(backend="eager")
        def step(leaf, grad):
            torch.manual_seed(0)
            forward(leaf).backward(grad)

        step(leaf, grad)
        assert_close([leaf.grad, *(p.grad for p in module.parameters())], plain[1:])

    return case


WIDE = {
    "gelu": lambda columns: fused.GELU(),
    "layer_norm": fused.LayerNorm,
    "rms_norm": fused.RMSNorm,
    "softmax": lambda columns: fused.Softmax(-1),
    "softmax_dropout": lambda columns: ScaledSoftmax(keep=_x(columns) > -1, dropout_p=0.3),
    "dropout": lambda columns: fused.Dropout(0.3),
}
CASES = {f"raw {name}": _refused(*case) for name, case in RAW.items()}
CASES |= {f"unpacked {layer.name}": _unpacked_as_half(layer) for layer in LAYERS}
CASES |= {f"default device {layer.name}": _default_device(layer) for layer in LAYERS}

SLOW = {f"compiled backward {name}": _compiled_backward(make) for name, make in WIDE.items()}
SLOW |= {f"compiled step {name}": _eager_forward_compiled_step(make) for name, make in WIDE.items()}
for name in ("compiled backward rms_norm", "compiled step layer_norm", "compiled step softmax_dropout"):
    CASES[name] = SLOW.pop(name)


def _run(case):
    """ "ok", an exception's text, or the signal that ended the process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = "ok"
        try:
            case()
        except BaseException:
            message = traceback.format_exc()
        os.write(writer, message.encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    status = os.waitpid(child, 0)[1]
    return f"ended by signal {status & 127}" if status & 127 else message


if __name__ == "__main__":
    torch.set_num_threads(1)  # no OpenMP pool, so that fork is safe
    for warm in (
        "unpacked dropout",
        "default device relu",
        "compiled step softmax_dropout",
    ):  # imports are done once, here
        with contextlib.suppress(Exception):
            CASES[warm]()
    chosen = SLOW if "slow" in sys.argv else CASES
    json.dump({name: _run(case) for name, case in chosen.items()}, sys.stdout)
