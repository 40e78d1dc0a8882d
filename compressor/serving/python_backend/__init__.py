"""Files of models for Triton's Python backend, which are copied into repositories; nothing here imports them."""
