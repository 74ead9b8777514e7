"""Training over several processes: rank groups, torchrun, Ray."""
