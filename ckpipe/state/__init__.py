"""What a state is made of: its walk, its tensors and its values."""
