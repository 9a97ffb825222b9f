"""The one place where the version of zpp stands."""

__version__ = "0.1.0"
