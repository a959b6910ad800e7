"""``python -m ckpipe.cli`` is the command ``ckpipe``."""

from ckpipe.cli import main

main()
