"""What keeps steps of the trainer and copies of the state apart."""
