"""Define the package's version, without importing anything."""

__version__ = "0.1.0"
