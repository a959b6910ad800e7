"""Decide who writes what, and where in which file."""

from __future__ import annotations
