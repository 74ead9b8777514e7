"""The import paths of verl's trainer: `gspo.trainer.ppo` and `gspo.trainer.config`."""
