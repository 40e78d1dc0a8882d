"""The NVIDIA GPU of this machine, through its driver alone: its name, its memory and its clock.

Only `libcuda` is needed, which comes with the driver. TensorRT cannot be used to detect a GPU, because without one its
runtime ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor.errors import ErrorCode, InputError, TargetMissingError

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and MINOR."""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING."""


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: name reported by the driver, e.g. `NVIDIA H200`.
        capability: compute capability, e.g. (9, 0).
        memory: size of its memory in bytes.
    """

    name: str
    capability: tuple[int, int]
    memory: int

    def __str__(self) -> str:
        return f"{self.name} (SM {self.capability[0]}.{self.capability[1]})"


class CudaDriver:
    """The driver API of the first GPU, in the primary context, which the CUDA runtime of this process uses too.

    Args:
        load: opens the driver's library by name.

    Attributes:
        device: the GPU.

    Raises:
        OSError: there is no driver.
        InputError: a call fails.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._library = load(_LIBRARY)
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
        """Call a function of the driver.

        Raises:
            InputError: the function returns an error; the message contains the driver's text.
        """
        status = getattr(self._library, name)(*args)
        if status:
            text = c_char_p()
            self._library.cuGetErrorString(status, byref(text))
            reason = (text.value or b"?").decode()
            full = status == _OUT_OF_MEMORY
            remedy = "free some of its memory or use smaller sizes" if full else "check the driver"
            raise InputError(
                f"{name}: the GPU's driver reports error {status} ({reason}); {remedy}",
                code=ErrorCode.OUT_OF_MEMORY if full else ErrorCode.RUNTIME_FAILED,
                function=name,
                status=status,
            )

    def enter(self) -> None:
        """Make the context current in this thread."""
        self.call("cuCtxSetCurrent", self._context)

    def free_memory(self) -> int:
        """Bytes of free memory on the GPU."""
        free, total = c_size_t(), c_size_t()
        self.enter()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value


def open_driver(load: Callable[[str], Any] = ctypes.CDLL) -> CudaDriver:
    """The driver of this machine's GPU.

    Args:
        load: opens the driver's library by name.

    Raises:
        TargetMissingError: there is no driver or no usable GPU; the message contains the driver's text.
    """
    try:
        return CudaDriver(load)
    except (OSError, AttributeError) as error:
        text = "there is no NVIDIA GPU here, or no driver for it (libcuda)"
        raise TargetMissingError(text, code=ErrorCode.DEVICE_MISSING) from error
    except InputError as error:
        text = f"there is no NVIDIA GPU here that can be used: {error}"
        raise TargetMissingError(text, code=ErrorCode.DEVICE_MISSING, **error.details) from error


driver = functools.cache(open_driver)
"""The driver of this machine's GPU, opened once; see `open_driver`."""


class CudaStream:
    """A CUDA stream with a start and a stop event."""

    def __init__(self, driver: CudaDriver) -> None:
        driver.enter()
        self._driver = driver
        self.handle = c_void_p()
        driver.call("cuStreamCreate", byref(self.handle), _NON_BLOCKING)
        self._start, self._stop = c_void_p(), c_void_p()
        for event in (self._start, self._stop):
            driver.call("cuEventCreate", byref(event), 0)

    def record_start(self) -> None:
        """Record the start event after all work enqueued so far."""
        self._driver.call("cuEventRecord", self._start, self.handle)

    def record_stop(self) -> None:
        """Record the stop event after all work enqueued so far."""
        self._driver.call("cuEventRecord", self._stop, self.handle)

    def synchronize(self) -> None:
        """Wait until all work enqueued so far has finished."""
        self._driver.call("cuStreamSynchronize", self.handle)

    def elapsed_seconds(self) -> float:
        """Seconds from the start event to the stop event, by the GPU's clock."""
        milliseconds = c_float()
        self._driver.call("cuEventElapsedTime", byref(milliseconds), self._start, self._stop)
        return milliseconds.value / 1e3

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver may be gone at exit
            self._driver.enter()
            for event in (self._start, self._stop):
                self._driver.call("cuEventDestroy_v2", event)
            self._driver.call("cuStreamDestroy_v2", self.handle)


class DeviceBuffer:
    """Memory on the GPU that grows on demand and is freed with the object."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver, self.address, self.size = driver, c_void_p(), 0

    def reserve(self, size: int) -> int:
        """Grow to `size` bytes, at least one, and return the address of the first; growing discards the content."""
        if size > self.size or not self.size:
            self.free()
            self._driver.call("cuMemAlloc_v2", byref(self.address), c_size_t(max(size, 1)))
            self.size = max(size, 1)
        return int(self.address.value or 0)

    def upload(self, array: np.ndarray, stream: CudaStream) -> int:
        """Copy an array to the GPU and return its address. The array must stay unchanged until `synchronize`."""
        address = self.reserve(array.nbytes)
        if array.nbytes:
            self._driver.call(
                "cuMemcpyHtoDAsync_v2", self.address, c_void_p(array.ctypes.data), c_size_t(array.nbytes), stream.handle
            )
        return address

    def download(self, array: np.ndarray, stream: CudaStream) -> None:
        """Fill an array from the GPU; its content is valid once the stream is synchronized."""
        if array.nbytes:
            self._driver.call(
                "cuMemcpyDtoHAsync_v2", c_void_p(array.ctypes.data), self.address, c_size_t(array.nbytes), stream.handle
            )

    def free(self) -> None:
        """Free the memory."""
        if self.size:
            self.size = 0
            self._driver.enter()
            self._driver.call("cuMemFree_v2", self.address)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver may be gone at exit
            self.free()
