"""Settings of all tests."""

import torch

# Tiny models gain nothing from several threads, and parallel test processes would compete for the cores.
torch.set_num_threads(1)
