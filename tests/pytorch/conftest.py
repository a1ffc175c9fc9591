"""One thread for PyTorch: workers share the cores, and the tensors of tests are small."""

import torch

torch.set_num_threads(1)
