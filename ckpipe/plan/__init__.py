"""Assign each tensor to a writing rank, a data file and an offset."""

from __future__ import annotations
