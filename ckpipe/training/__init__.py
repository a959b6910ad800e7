"""Save models and optimizers in a form that any wrapper can load, and load them from it."""
