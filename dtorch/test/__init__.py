"""Helpers for tests of code that uses dtorch."""
