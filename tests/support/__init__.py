"""What several test folders use: a run of seconds, pairs of math answers."""
