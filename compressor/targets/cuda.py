"""The NVIDIA GPU of this machine, through its driver alone: what it is, memory on it, and its clock.

Nothing but `libcuda` is needed, which comes with the driver. TensorRT itself must not be asked whether there is a GPU:
without one its runtime ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass

import numpy as np

from compressor.errors import InputError, TargetMissingError

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and MINOR."""


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: as its maker calls it, e.g. `NVIDIA H200`.
        capability: compute capability, e.g. (9, 0).
        memory: bytes on it.
    """

    name: str
    capability: tuple[int, int]
    memory: int

    def __str__(self) -> str:
        return f"{self.name} (SM {self.capability[0]}.{self.capability[1]})"


class CudaDriver:
    """The driver's calls, on the first GPU, in the context that the CUDA runtime of this process uses too.

    Raises:
        OSError: there is no driver.
        InputError: a call fails; the message names it.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        self.call("cuInit", 0)
        device, major, minor, memory = c_int(), c_int(), c_int(), c_size_t()
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDeviceGetName", name, len(name), device)
        self.call("cuDeviceGetAttribute", byref(major), _MAJOR, device)
        self.call("cuDeviceGetAttribute", byref(minor), _MINOR, device)
        self.call("cuDeviceTotalMem_v2", byref(memory), device)
        self.device = Device(name.value.decode(), (major.value, minor.value), memory.value)
        self._context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(self._context), device)

    def call(self, name: str, *args: object) -> None:
        """One call of the driver."""
        failed = getattr(self._library, name)(*args)
        if failed:
            said = c_char_p()
            self._library.cuGetErrorString(failed, byref(said))
            why = (said.value or b"?").decode()
            mend = "free some of its memory or give smaller sizes" if failed == _OUT_OF_MEMORY else "check the driver"
            raise InputError(f"the GPU's driver refuses {name} (error {failed}: {why}); {mend}")

    def enter(self) -> None:
        """Make the context current in this thread."""
        self.call("cuCtxSetCurrent", self._context)

    def free_memory(self) -> int:
        """Bytes that are free on the GPU."""
        free, total = c_size_t(), c_size_t()
        self.enter()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value


@functools.cache
def driver() -> CudaDriver:
    """The driver.

    Raises:
        TargetMissingError: there is none, or no GPU; the message has what it says itself.
    """
    try:
        return CudaDriver()
    except (OSError, AttributeError) as error:
        raise TargetMissingError("there is no NVIDIA GPU here, or no driver for it (libcuda)") from error
    except InputError as error:
        raise TargetMissingError(f"there is no NVIDIA GPU here that can be used: {error}") from error


class Stream:
    """An order of work on the GPU, with two marks to take the time between."""

    def __init__(self, of: CudaDriver) -> None:
        of.enter()
        self._driver = of
        self.handle = c_void_p()
        of.call("cuStreamCreate", byref(self.handle), 1)  # CU_STREAM_NON_BLOCKING
        self._marks = (c_void_p(), c_void_p())
        for mark in self._marks:
            of.call("cuEventCreate", byref(mark), 0)

    def mark(self, which: int) -> None:
        """Note the time when all work given so far is done, as mark 0 or 1."""
        self._driver.call("cuEventRecord", self._marks[which], self.handle)

    def wait(self) -> None:
        """Until all work given so far is done."""
        self._driver.call("cuStreamSynchronize", self.handle)

    def seconds(self) -> float:
        """From mark 0 to mark 1, by the GPU's clock."""
        milliseconds = c_float()
        self._driver.call("cuEventElapsedTime", byref(milliseconds), *self._marks)
        return milliseconds.value / 1e3

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver may be gone at exit
            self._driver.enter()
            for mark in self._marks:
                self._driver.call("cuEventDestroy_v2", mark)
            self._driver.call("cuStreamDestroy_v2", self.handle)


class Buffer:
    """Memory on the GPU, that grows as it must and is given back with the object."""

    def __init__(self, of: CudaDriver) -> None:
        self._driver, self.address, self.size = of, c_void_p(), 0

    def reserve(self, size: int) -> int:
        """Make room for `size` bytes, one at least; the address of the first."""
        if size > self.size or not self.size:
            self.release()
            self._driver.call("cuMemAlloc_v2", byref(self.address), c_size_t(max(size, 1)))
            self.size = max(size, 1)
        return int(self.address.value or 0)

    def upload(self, array: np.ndarray, stream: Stream) -> int:
        """Copy an array there; it must stay as it is until the stream has been waited for."""
        address = self.reserve(array.nbytes)
        if array.nbytes:
            self._driver.call(
                "cuMemcpyHtoDAsync_v2", self.address, c_void_p(array.ctypes.data), c_size_t(array.nbytes), stream.handle
            )
        return address

    def download(self, array: np.ndarray, stream: Stream) -> None:
        """Fill an array from there, once the stream has been waited for."""
        if array.nbytes:
            self._driver.call(
                "cuMemcpyDtoHAsync_v2", c_void_p(array.ctypes.data), self.address, c_size_t(array.nbytes), stream.handle
            )

    def release(self) -> None:
        """Give the memory back."""
        if self.size:
            self.size = 0
            self._driver.enter()
            self._driver.call("cuMemFree_v2", self.address)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver may be gone at exit
            self.release()
