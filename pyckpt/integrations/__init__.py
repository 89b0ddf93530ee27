"""Other libraries: attention by their own switches (transformers, timm), and callbacks of their trainers (trainer, lightning).

Each module but timm imports its library, so import only the one you need.
"""
