"""How models and optimizers become a state that fits any wrapper, and are filled from one."""
