"""The version, in one place: setup.py and CMake read it from here."""

__version__ = "0.2.0"
