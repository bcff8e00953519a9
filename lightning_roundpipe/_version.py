"""The version, read by the build and by the package itself."""

__all__ = ["__version__"]

__version__ = "0.1.0"
