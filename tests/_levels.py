"""What the tests of the levels share: blocks of two kinds, a step, and its operations."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests._engine import region

BATCH, SEQUENCE, WIDTH, HEADS, LAYERS = 2, 128, 128, 4, 3
UNIT = BATCH * SEQUENCE * WIDTH * 4 // 2  # bytes of one sbh in float32
LEVELS = ("pointwise", "mlp", "linear")


class GPT2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(self.act(self.fc1(self.ln_2(x))))


class LlamaBlock(nn.Module):
    """Without biases: rotary embeddings, two key-value heads, SwiGLU."""

    def __init__(self, fused=False):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        linear = lambda n, m: nn.Linear(n, m, bias=False)  # noqa: E731
        self.q, self.k, self.v = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH // 2), linear(WIDTH, WIDTH // 2)
        self.o = linear(WIDTH, WIDTH)
        self.fused = fused
        if fused:
            self.gate_up = linear(WIDTH, 8 * WIDTH)
        else:
            self.gate, self.up = linear(WIDTH, 4 * WIDTH), linear(WIDTH, 4 * WIDTH)
        self.down = linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        cos, sin = (
            torch.linspace(0, 6, SEQUENCE)[:, None].expand(-1, WIDTH // HEADS).contiguous().cos().to(x.dtype),
            0.5,
        )
        h = self.norm_1(x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        turned = lambda t: torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1)  # noqa: E731
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        gate, up = self.gate_up(h).chunk(2, -1) if self.fused else (self.gate(h), self.up(h))
        return x + self.down(F.silu(gate) * up)


def stack(block=GPT2Block, **kwargs):
    torch.manual_seed(1)
    return nn.Sequential(*(block(**kwargs) for _ in range(LAYERS)))


def sample(dtype=torch.float32, requires_grad=True):
    return torch.randn(BATCH, SEQUENCE, WIDTH, dtype=dtype).requires_grad_(requires_grad)


def flops(run):
    run()  # products of the first use's checks are not counted, but whatever is remembered shall be
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def step(model, x, level=None, autocast=False):
    with (
        torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext(),
        region(level is not None, policy=level),
    ):
        loss = (model(x) * 1.0).float().square().mean()
    inputs = [p for p in [x, *model.parameters()] if p.requires_grad]
    for p in inputs:
        p.grad = None
    loss.backward()
    return [p.grad for p in inputs]
