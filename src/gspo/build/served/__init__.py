"""From a model, a run or a checkpoint to the engine and the prompts of a server."""
