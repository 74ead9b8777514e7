"""Planning: the step time and memory of a run on a cluster, predicted without torch from a model's shape."""
