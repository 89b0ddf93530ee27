"""Triton kernels and their launchers, one module per op family. Imports torch and triton, never pyckpt."""
