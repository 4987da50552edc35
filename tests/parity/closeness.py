"""The tolerances of the design's architecture page, in one place."""

import torch

FP64 = 1e-10
FP32_VALUE = 1e-5
FP32_GRADIENT = 2e-5
# Below this size an fp32 gradient of our unit-scale inputs is rounding noise (TAID at t=0: the exact gradient is zero).
FP32_NOISE = 1e-6


def assert_value(actual, expected, dtype=torch.float32):
    """|a - b| <= 1e-5 + 1e-5 |b| in fp32, 1e-10 in fp64, for every entry."""
    actual = torch.as_tensor(actual).detach().double()
    expected = torch.as_tensor(expected).detach().double()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    absolute, relative = (FP64, FP64) if dtype == torch.float64 else (FP32_VALUE, FP32_VALUE)
    excess = (actual - expected).abs() - (absolute + relative * expected.abs())
    assert not bool((~(excess <= 0)).any()), f"got {actual.tolist()}, expected {expected.tolist()}"


def assert_gradient(actual, expected, dtype=torch.float32):
    """Relative L2 <= 2e-5 in fp32, 1e-10 in fp64, for the whole tensor."""
    assert actual is not None, "no gradient arrived"
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    distance, size = float((actual - expected).norm()), float(expected.norm())
    if dtype == torch.float64:
        assert distance <= FP64 * max(size, 1.0), f"L2 distance {distance}, reference norm {size}"
    else:
        limit = FP32_GRADIENT * size if size > FP32_NOISE else FP32_NOISE
        assert distance <= limit, f"L2 distance {distance}, reference norm {size}"


def assert_no_gradient(tensor):
    """A detached input received nothing: no gradient at all, or exact zeros."""
    assert tensor.grad is None or int(torch.count_nonzero(tensor.grad)) == 0


def value_and_gradients(fn, *inputs):
    """fn(*copies) and its gradient by each of the inputs."""
    leaves = [x.detach().clone().requires_grad_(True) for x in inputs]
    value = fn(*leaves)
    return value.detach(), torch.autograd.grad(value.sum(), leaves)
