"""Builds the native module; everything else is in pyproject.toml."""

from setuptools import setup

# The module uses the limited API: one wheel serves every Python from 3.10 on.
setup(cffi_modules=["native/build.py:ffi"], options={"bdist_wheel": {"py_limited_api": "cp310"}})
