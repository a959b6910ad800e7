"""Keep steps of the trainer and copies of the state apart."""

from __future__ import annotations
