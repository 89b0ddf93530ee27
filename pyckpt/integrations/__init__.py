"""Other libraries' own switches, set to this package. Each module imports its library, so import only the one you need."""
