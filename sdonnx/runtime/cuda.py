"""The few calls of the CUDA runtime that ONNX Runtime's Python interface lacks: a stream, free memory, captured graphs.

The library is the one that ONNX Runtime itself has loaded by then.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import onnxruntime

from sdonnx.errors import ProviderError

__all__ = ["CapturedGraph", "Cuda", "Event", "cuda", "small_workspaces"]

# ONNX Runtime 1.31 is built for CUDA 13, older builds for 12: whichever it has loaded.
_LIBRARIES = ("libcudart.so.13", "libcudart.so.12")
_DEVICE_TO_DEVICE = 3
_NON_BLOCKING = 1
# Another thread that allocates meanwhile does no harm.
_CAPTURE_THREAD_LOCAL = 1
_LEAST_SPARE = 2**20

# cuBLAS takes 32 MB a handle on sm_90 by default, and ONNX Runtime makes two handles for each session. Two of
# 4 MB cost no speed (docs/decisions.md).
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:2")

# cudaDevAttrComputeCapabilityMajor and -Minor (driver_types.h).
_CAPABILITY = (75, 76)


class Cuda:
    """The CUDA runtime for one device, with the one stream that all graphs run on.

    Graphs share their scratch memory, which is safe because they follow one another on this stream.

    Args:
        index: the number of the GPU.

    Attributes:
        recording: held while a CUDA graph is recorded: no other thread may touch the stream then.

    Raises:
        ProviderError: the library or the device cannot be used.
    """

    def __init__(self, index: int) -> None:
        self._library = _library()
        self.index = index
        self.use()
        stream = ctypes.c_void_p()
        self._check(self._library.cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING))
        self._stream = stream
        self.recording = threading.Lock()

    @property
    def stream(self) -> int:
        """The address of the stream."""
        return self._stream.value or 0

    def use(self) -> None:
        """Make the device the calling thread's."""
        self._check(self._library.cudaSetDevice(self.index))

    def synchronize(self) -> None:
        """Wait until everything on the stream is done."""
        self._check(self._library.cudaStreamSynchronize(self._stream))

    def memory(self) -> tuple[int, int]:
        """Return the free memory of the device and all of it, in bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
        return free.value, total.value

    def capability(self) -> tuple[int, int]:
        """Return the device's compute capability, major and minor: (9, 0) for sm_90."""
        numbers = []
        for attribute in _CAPABILITY:
            number = ctypes.c_int()
            self._check(self._library.cudaDeviceGetAttribute(ctypes.byref(number), attribute, self.index))
            numbers.append(number.value)
        return numbers[0], numbers[1]

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy `size` bytes between two addresses of the device and wait for it."""
        self._check(
            self._library.cudaMemcpyAsync(
                ctypes.c_void_p(target),
                ctypes.c_void_p(source),
                ctypes.c_size_t(size),
                _DEVICE_TO_DEVICE,
                self._stream,
            )
        )
        self.synchronize()

    @contextmanager
    def spare(self, size: int) -> Iterator[None]:
        """Keep `size` bytes of the device's memory from what runs meanwhile, or a half, quarter, ... of it at least."""
        held = ctypes.c_void_p()
        missing = 1
        while missing and size >= _LEAST_SPARE:
            missing = self._library.cudaMalloc(ctypes.byref(held), ctypes.c_size_t(size))
            if missing:
                self._library.cudaGetLastError()  # or the next call that asks would be told of it
            size //= 2
        try:
            yield
        finally:
            if not missing:
                self._library.cudaFree(held)

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Record what `work` puts on the stream, which does not run, as a graph that can be launched.

        Raises:
            ProviderError: something in it cannot be recorded, such as an allocation.
        """
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._library.cudaStreamBeginCapture(self._stream, _CAPTURE_THREAD_LOCAL))
        try:
            work()
        except BaseException:
            # The stream must not stay in this state; there may be no graph.
            if not self._library.cudaStreamEndCapture(self._stream, ctypes.byref(graph)) and graph:
                self._library.cudaGraphDestroy(graph)
            self._library.cudaGetLastError()
            raise
        self._check(self._library.cudaStreamEndCapture(self._stream, ctypes.byref(graph)))
        try:
            self._check(self._library.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
            # Otherwise the first launch takes it to the device.
            self._check(self._library.cudaGraphUpload(executable, self._stream))
        except ProviderError:
            if executable:
                self.destroy(executable)
            raise
        finally:
            self._library.cudaGraphDestroy(graph)
        return CapturedGraph(self, executable)

    def launch(self, executable: ctypes.c_void_p) -> None:
        """Queue a captured graph."""
        self._check(self._library.cudaGraphLaunch(executable, self._stream))

    def destroy(self, executable: ctypes.c_void_p) -> None:
        """Give a captured graph back; nothing may be running it."""
        self._library.cudaGraphExecDestroy(executable)

    def event(self) -> Event:
        """Return a mark on the stream: the time at which everything that is queued by now will be done."""
        handle = ctypes.c_void_p()
        self._check(self._library.cudaEventCreate(ctypes.byref(handle)))
        event = Event(self._library, handle)
        self._check(self._library.cudaEventRecord(handle, self._stream))
        return event

    def milliseconds(self, start: Event, end: Event) -> float:
        """Wait for two marks and return the time between them on the device's clock."""
        elapsed = ctypes.c_float()
        self._check(self._library.cudaEventSynchronize(end.handle))
        self._check(self._library.cudaEventElapsedTime(ctypes.byref(elapsed), start.handle, end.handle))
        return elapsed.value

    def _check(self, status: int) -> None:
        if status:
            self._library.cudaGetLastError()  # or ONNX Runtime's next kernel would be told of it
            self._library.cudaGetErrorString.restype = ctypes.c_char_p
            reason = self._library.cudaGetErrorString(status).decode()
            raise ProviderError(
                f"CUDA says {reason!r} for GPU {self.index}", "a GPU that can be used", "check nvidia-smi"
            )


class CapturedGraph:
    """A CUDA graph that was recorded; it is given back with the object."""

    def __init__(self, runtime: Cuda, executable: ctypes.c_void_p) -> None:
        self._runtime, self._executable = runtime, executable

    def launch(self) -> None:
        """Queue it: what was recorded runs after all that is queued by now."""
        self._runtime.launch(self._executable)

    def release(self) -> None:
        """Give it back; nothing may be running it."""
        if self._executable:
            self._runtime.destroy(self._executable)
            self._executable = ctypes.c_void_p()

    def __del__(self) -> None:
        """Give it back."""
        self.release()


class Event:
    """A CUDA event; it is given back with the object."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self.handle = library, handle

    def __del__(self) -> None:
        """Give the event back; CUDA keeps one that is still queued until it is reached."""
        self._library.cudaEventDestroy(self.handle)


def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise ProviderError(
        f"none of {', '.join(_LIBRARIES)} could be loaded", "the CUDA libraries", "pip install 'sdonnx[cuda]'"
    )


@functools.cache
def cuda(index: int) -> Cuda:
    """Return the CUDA runtime for a device, one for the whole process, its scratch memory registered.

    ONNX Runtime keeps the scratch memory of a device for as long as the process lives.
    """
    runtime = Cuda(index)
    info = onnxruntime.OrtMemoryInfo(
        "Cuda", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, index, onnxruntime.OrtMemType.DEFAULT
    )
    # 1 is kSameAsRequested: doubling at each growth would hold up to twice what is used.
    arena = onnxruntime.OrtArenaCfg({"max_mem": 0, "arena_extend_strategy": 1})
    onnxruntime.create_and_register_allocator_v2(
        "CUDAExecutionProvider", info, {"device_id": str(index), "user_compute_stream": str(runtime.stream)}, arena
    )
    return runtime


@contextmanager
def small_workspaces() -> Iterator[None]:
    """Let cuBLAS handles that are made meanwhile take little memory, unless the user has said how much."""
    name, value = _WORKSPACE
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
