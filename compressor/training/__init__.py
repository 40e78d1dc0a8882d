"""Training: what plain training and learning with gates share, and language models from scratch."""
