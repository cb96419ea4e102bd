"""What bench/gpu.py times, with the CUDA kernels: at tiny sizes it does what stock torch does."""

from __future__ import annotations

import gpu_cases
import pytest
from sides import check_sides


@pytest.mark.parametrize("op", gpu_cases.OPERATORS)
def test_both_sides_of_a_case_do_the_same(op, device):
    """Catches timings of an operator that is called wrongly: with strides, batches or lengths that it does not mean."""
    for case in gpu_cases.cases(device, gpu_cases.TINY, (op,)):
        check_sides(case)
