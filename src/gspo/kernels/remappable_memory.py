"""GPU memory that can be given back to the driver and taken again at the same address.

CUDA graphs hold addresses: freeing the pages of a KV cache the ordinary way makes every captured decode step useless.
The driver's virtual memory calls separate an address range, which stays, from the memory behind it, which comes and
goes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


class RemappingFailed(RuntimeError):
    """The driver refused a call: too little memory is free, or it does not support virtual memory."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RemappingFailed(str(error)) from None


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        raise RemappingFailed(f"{name} failed with CUDA error {code}")


class RemappableMemory:
    """`num_bytes` of a GPU's memory behind a fixed address, mapped now. Its content is undefined after each `map`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.init()
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.zeros(1, device=self._device)  # makes the device's context the current one of this thread
        self._location = _Location(_DEVICE, self._device.index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        step = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), 0)
        self._size = ctypes.c_size_t(-(-num_bytes // step.value) * step.value)
        self._address, self._handle = ctypes.c_uint64(), ctypes.c_uint64()
        self.is_mapped = False
        _call("cuMemAddressReserve", ctypes.byref(self._address), self._size, 0, ctypes.c_uint64(0), ctypes.c_uint64(0))
        try:
            self.map()
        except RemappingFailed:
            _call("cuMemAddressFree", self._address, self._size)
            raise
        self.bytes = _as_tensor(self._address.value, num_bytes, self._device)

    def map(self) -> None:
        """Put memory behind the address."""
        if self.is_mapped:
            return
        torch.cuda.empty_cache()  # what torch holds in reserve is not there for the driver
        _call("cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        try:
            _call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), self._handle, ctypes.c_uint64(0))
            access = _Access(self._location, _READ_WRITE)
            _call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        except RemappingFailed:
            _call("cuMemRelease", self._handle)
            raise
        self.is_mapped = True

    def unmap(self) -> None:
        """Give the memory back. Until `map`, nothing may read or write at the address."""
        if not self.is_mapped:
            return
        torch.cuda.synchronize(self._device)
        _call("cuMemUnmap", self._address, self._size)
        _call("cuMemRelease", self._handle)
        self.is_mapped = False

    def close(self) -> None:
        """Give the memory and the address back; `bytes` must not be used any more."""
        if self._address.value:
            self.unmap()
            _call("cuMemAddressFree", self._address, self._size)
            self._address.value = 0

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # the process ends: the driver frees everything
            return


def _as_tensor(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """The bytes at an address as a tensor that does not own them."""

    class Array:
        __cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}

    return torch.as_tensor(Array(), device=device)
