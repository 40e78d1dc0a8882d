"""Methods that remove heads and neurons under a budget, without training."""
