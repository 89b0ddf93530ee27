"""Benchmarks of pyckpt against eager PyTorch and torch.compile: ``python -m bench``, from the checkout.

_harness.py   allocator setting, machine, contention, timing of several implementations in turn
_check.py     results against a float64 oracle, before anything is timed
ops.py        the table of subjects: what is compared with what, and how many bytes it must move
_run.py       one row of the table: check, time, count memory
_report.py    terminal table, JSON, PNG
minilm.py     the real job: fine-tuning a pretrained sentence encoder (``python -m bench.minilm``)
_encoder.py   its text, model, loss and training step
engine.py     a training step of a GPT-2-like stack, the engine beside its peers (``python -m bench.engine``)
_stack.py     the stack, and the ways of training it
_hooks.py     what the engine's hooks cost a saved tensor
gpu_check.py  build, test and measure on a GPU in five minutes (``python -m bench.gpu_check``, bench/gpu_check)
_peers.py     fused kernels of other packages, where they are installed
_alone.py     the command line of one subject by itself
coverage.py   what is saved on real architectures (``python -m bench.coverage``): docs/coverage.md
_architectures.py   their models, random and of any size
audit/        what the compiled kernels use (``python -m bench.audit``): docs/audit.md and docs/audit_cuda.md
"""
