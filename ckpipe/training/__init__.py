"""Make models and optimizers a state that fits any wrapper, and fill them from one."""
