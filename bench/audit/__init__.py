"""Static checks of compiled kernels: ``python -m bench.audit``. What they use, and what they must not do."""
