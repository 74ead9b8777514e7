"""TRL's names: `from gspo.compat.trl import GRPOConfig, GRPOTrainer` in place of `from trl import …`."""

from gspo.compat.trl.config import GRPOConfig as GRPOConfig
from gspo.compat.trl.trainer import GRPOTrainer as GRPOTrainer
