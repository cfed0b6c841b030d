"""`python -m cupy_slots`: what works on this machine; `python -m cupy_slots check`: a self-test of what does."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from . import CacheGroup, __version__, get_compressed_slot_mapping, get_compressed_slot_mappings
from ._jit import Kernel, kernel_dir, require_cupy

Maker = Callable[[Any, str], Any]  # nested list, dtype


def backends() -> dict[str, Maker | str]:
    """By name: how to make an array, or why the backend does not work here."""
    found: dict[str, Maker | str] = {"numpy": np.asarray}
    try:
        cupy = require_cupy()
        no_gpu = ""
    except RuntimeError as reason:
        no_gpu = str(reason)
    found["cupy"] = no_gpu or cupy.asarray
    if importlib.util.find_spec("torch") is None:
        found["torch"] = found["torch-cuda"] = 'torch is not installed. pip install "cupy_slots[torch]"'
        return found
    try:
        import torch
    except Exception as reason:  # a broken install raises anything, not only ImportError
        found["torch"] = found["torch-cuda"] = f"torch cannot be imported: {reason}"
        return found
    found["torch"] = lambda values, dtype: torch.tensor(values, dtype=getattr(torch, dtype))
    if not torch.cuda.is_available():
        no_gpu = no_gpu or f"torch {torch.__version__} sees no CUDA device"
    found["torch-cuda"] = no_gpu or (
        lambda values, dtype: torch.tensor(values, dtype=getattr(torch, dtype), device="cuda")
    )
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def show() -> None:
    """Print versions, devices, backends and kernels."""
    print(f"cupy_slots {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ("numpy", "cupy-cuda12x", "cupy-cuda13x", "torch"):
        print(f"  {package}: {_version(package)}")
    print("backends")
    for name, backend in backends().items():
        print(f"  {name}: {backend if isinstance(backend, str) else 'works'}")
    print(f"kernels from {kernel_dir()}")
    for kernel in Kernel.registry:
        macros = " ".join(f"{name}={value}" for name, value in kernel.macros.items())
        devices = ", ".join(f"cuda:{device}" for device in kernel.loaded)
        print(f"  {kernel.name} ({macros}): {f'compiled, loaded on {devices}' if devices else 'not compiled'}")
    try:
        runtime = require_cupy().cuda.runtime
    except RuntimeError:
        return
    print(f"CUDA driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}")
    for device in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(device)
        print(f"  cuda:{device}: {properties['name'].decode()}, sm_{properties['major']}{properties['minor']}")


def _self_test(make: Maker, dtype: str) -> None:
    """Map a few batches with known answers; an AssertionError shows the first that is wrong."""
    query_start_loc, seq_lens = make([0, 5, 8], dtype), make([8, 6], dtype)
    table = make([[10, 11], [20, 21]], dtype)
    masked = make([0, 1, 2, 3, -1, 5, 6, 7], dtype)
    out = make([7] * 10, "int64")
    plain = get_compressed_slot_mapping(8, None, query_start_loc, seq_lens, table, 64, 4, out)
    assert plain.tolist() == [640, -1, -1, -1, 641, 1280, -1, -1], plain.tolist()
    assert out.tolist()[8:] == [-1, -1], out.tolist()
    groups = [CacheGroup(table, 4, 1), CacheGroup(table, 64, 4)]
    raw, compressed = get_compressed_slot_mappings(8, masked, query_start_loc, seq_lens, groups)
    assert raw.tolist() == [43, 44, 45, 46, -1, 83, 84, 85], raw.tolist()
    assert compressed.tolist() == [640, -1, -1, -1, -1, 1280, -1, -1], compressed.tolist()
    sharded = get_compressed_slot_mapping(
        8, None, query_start_loc, seq_lens, table, 64, 4, dcp_world_size=2, dcp_rank=1, cp_shard="state"
    )
    assert sharded.tolist() == [-1, -1, -1, -1, 640, -1, -1, -1], sharded.tolist()
    tokens = 100_000
    ends, pages = make([tokens], dtype), make([list(range(400))], dtype)
    long = get_compressed_slot_mapping(tokens, None, make([0, tokens], dtype), ends, pages, 64, 4)
    assert long.tolist() == [t // 4 if t % 4 == 3 else -1 for t in range(tokens)]


def check() -> int:
    """Self-test every usable backend; the exit code."""
    failures = 0
    for name, backend in backends().items():
        if isinstance(backend, str):
            print(f"{name}: skipped, {backend}")
            continue
        try:
            for dtype in ("int32", "int64"):
                _self_test(backend, dtype)
        except Exception as reason:
            failures += 1
            print(f"{name}: FAILED, {type(reason).__name__}: {reason}")
        else:
            print(f"{name}: passed")
    return int(failures > 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_slots", description="What cupy_slots can do on this machine.")
    parser.add_argument("command", nargs="?", choices=["show", "check"], default="show", help="default: show")
    if parser.parse_args(arguments).command == "check":
        return check()
    show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
