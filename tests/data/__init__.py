"""Data that tests share; importable as `data` because pytest has tests/ on its path."""
