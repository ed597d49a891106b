"""How precisely matrices are multiplied, and by which library."""
import torch

LARGEST_ERROR = 1e-6  # of a float32 product, relative


def prefer_onednn():
    """Leave float32 products on a CPU to oneDNN where that costs no precision; twice as fast as MKL on AMD's.

    What asks for oneDNN also allows it to round to bfloat16. It does so on processors with matrix units for it (AMX)
    only; one product tells.
    """
    torch.backends.mkldnn.matmul.fp32_precision = 'bf16'
    if _error_of_a_product() > LARGEST_ERROR:
        torch.backends.mkldnn.matmul.fp32_precision = 'none'


def _error_of_a_product():
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    return ((a @ b - exact).norm() / exact.norm()).item()
