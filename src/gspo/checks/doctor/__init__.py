"""What `gspo doctor` examines."""
