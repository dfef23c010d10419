"""Differences found by torch, on any device: the same positions and bytes as NumPy finds, in little memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import swarm_compression as sc
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from swarmtrain.errors import UserError
from swarmtrain.patch import patch
from swarmtrain.tensor_diff import find_changes, find_changes_of_state

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


def bits(tensor: torch.Tensor) -> np.ndarray:
    width = tensor.element_size()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return tensor.cpu().reshape(-1).view(signed).numpy().view(f"u{width}")


def pair(dtype: torch.dtype, count: int, share: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(count, generator=generator).mul(50).to(dtype)
    new = torch.where(torch.rand(count, generator=generator) < share, torch.ones(()).to(dtype), base)
    return new.to(device), base.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "share"), [(1, 1.0), (1000, 0.0), (100_003, 0.02), (100_003, 1.0)])
def test_what_is_found_is_what_numpy_finds(dtype: torch.dtype, count: int, share: float, device: str) -> None:
    new, base = pair(dtype, count, share, device)
    found = find_changes(new, base)
    expected = np.flatnonzero(bits(new) != bits(base))
    assert found.positions.dtype == np.int64
    assert np.array_equal(found.positions, expected)
    assert np.array_equal(found.values, bits(new)[expected])


def test_bit_patterns_are_compared_and_not_values() -> None:
    base = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.float32)
    new = torch.tensor([-0.0, float("nan"), 1.0], dtype=torch.float32)
    assert find_changes(new, base).positions.tolist() == [0]


def test_tensors_that_cannot_be_compared_are_refused() -> None:
    one = torch.zeros(4, 4)
    for other in (torch.zeros(4, 5), torch.zeros(4, 4, dtype=torch.float16)):
        with pytest.raises(ValueError, match="unequal"):
            find_changes(one, other)
    with pytest.raises(ValueError, match="contiguous"):
        find_changes(one.T, one)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of results that are alive at once; views and inputs do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            size = result.numel() * result.element_size()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(result, self._free, size)
        return result

    def _free(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_working_memory_is_an_eighth_of_the_tensor_even_if_all_differs(dtype: torch.dtype) -> None:
    base = torch.zeros(1 << 22, dtype=dtype)
    new = torch.ones(1 << 22, dtype=dtype)
    with LiveBytes() as live:
        assert find_changes(new, base).positions.size == 1 << 22
    assert 0 < live.peak <= base.numel() * base.element_size() // 8


@needs_cuda
def test_working_memory_on_a_gpu_is_an_eighth_of_the_tensor() -> None:
    base = torch.zeros(1 << 26, dtype=torch.bfloat16, device="cuda")
    new = torch.ones_like(base)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    find_changes(new, base)
    assert torch.cuda.max_memory_allocated() - before <= base.numel() * 2 // 8


def state_pair() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(6)
    base = {
        "a": rng.standard_normal((300, 400)).astype(np.float16),
        "b": np.arange(10),
        "c": np.zeros((), np.float32),
        "e": np.zeros((0, 3), np.float32),
        "m": rng.random(64) < 0.5,
    }
    new = {name: array.copy() for name, array in base.items()}
    new["a"].view(np.uint16)[rng.random((300, 400)) < 0.05] += 1
    new["c"] = np.array(-0.0, np.float32)
    new["m"] = ~new["m"]
    return new, base


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["fast", "default", "best"])
def test_the_patch_has_the_bytes_of_the_hosts(device: str, level: sc.Level) -> None:
    new, base = state_pair()
    layout = sc.Layout.of(base)
    seen: list[int] = []
    changes = find_changes_of_state(new, base, layout, device, on_progress=seen.append)
    assert sum(seen) == layout.elements
    assert b"".join(sc.stream_changes(base, changes, level=level)) == sc.encode_patch(new, base, level=level)


@needs_cuda
def test_the_command_writes_the_same_patch_on_a_gpu(tmp_path: Path) -> None:
    new, base = state_pair()
    save_file(base, tmp_path / "old.safetensors")
    save_file(new, tmp_path / "new.safetensors")
    for device in ("cpu", "cuda"):
        paths = [str(tmp_path / name) for name in ("old.safetensors", "new.safetensors", device)]
        arguments = ["diff", *paths[:2], "-o", paths[2], "--device", device]
        CliRunner().invoke(patch, arguments, catch_exceptions=False, standalone_mode=False)
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "cuda").read_bytes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    new, base = state_pair()
    save_file(base, tmp_path / "old.safetensors")
    save_file(new, tmp_path / "new.safetensors")
    arguments = [str(tmp_path / name) for name in ("old.safetensors", "new.safetensors")]
    with pytest.raises(UserError, match="device 'cuda' cannot be used") as caught:
        CliRunner().invoke(
            patch,
            ["diff", *arguments, "-o", str(tmp_path / "p"), "--device", "cuda"],
            catch_exceptions=False,
            standalone_mode=False,
        )
    assert "\n" not in caught.value.message
    assert not (tmp_path / "p").exists()
