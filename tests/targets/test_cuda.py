"""The driver of an NVIDIA GPU, on a stand-in for its library."""

from __future__ import annotations

from typing import Any

import pytest

from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.targets.cuda import CudaDriver, Device, open_driver


class Library:
    """A driver's library whose calls return given statuses.

    Args:
        statuses: status by function name; zero otherwise.
        message: text of every error.
    """

    def __init__(self, message: str = "", **statuses: int) -> None:
        self.message, self.statuses = message, statuses

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.statuses.get(name, 0)

    def cuGetErrorString(self, status: int, text: Any) -> None:  # noqa: N802
        text._obj.value = self.message.encode()


def fail_to_load(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def test_a_machine_without_a_driver_lacks_the_device() -> None:
    with pytest.raises(TargetMissingError) as error:
        open_driver(fail_to_load)
    assert error.value.code is ErrorCode.DEVICE_MISSING


def test_a_machine_without_a_usable_gpu_lacks_the_device_and_the_drivers_message_is_repeated() -> None:
    message = "system has unsupported display driver / cuda driver combination"
    with pytest.raises(TargetMissingError) as error:
        open_driver(lambda name: Library(message, cuInit=803))
    assert error.value.code is ErrorCode.DEVICE_MISSING
    assert error.value.details == {"function": "cuInit", "status": 803}
    assert message in str(error.value)


@pytest.mark.parametrize(("status", "code"), [(2, ErrorCode.OUT_OF_MEMORY), (700, ErrorCode.RUNTIME_FAILED)])
def test_a_call_that_fails_names_the_function(status: int, code: ErrorCode) -> None:
    driver = CudaDriver(lambda name: Library("broken", cuMemGetInfo_v2=status))
    with pytest.raises(InputError) as error:
        driver.free_memory()
    assert error.value.code is code
    assert error.value.details == {"function": "cuMemGetInfo_v2", "status": status}


def test_a_device_is_printed_with_its_compute_capability() -> None:
    assert str(Device("NVIDIA H200", (9, 0), 1 << 37)) == "NVIDIA H200 (SM 9.0)"
