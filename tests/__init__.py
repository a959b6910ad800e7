"""Tests of ckpipe; ``CONTRIBUTING.md`` says what each folder holds."""

import os

# Threads of torch that wait for each other sleep: two processes of tests on two processors would
# else spin most of their time. It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
