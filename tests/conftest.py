"""What all tests have in common."""

import torch

# Tiny models gain nothing from several threads, and processes that test at the same time would wait for each other's.
torch.set_num_threads(1)
