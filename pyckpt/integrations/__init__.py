"""pyckpt in other libraries. Nothing here is imported by ``import pyckpt``."""
