"""Builds the native module; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["native/build.py:ffi"])
