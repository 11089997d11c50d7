"""Calls of the CUDA runtime that ONNX Runtime's Python API lacks: a stream, free memory and captured graphs.

They use the CUDA library that ONNX Runtime has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import onnxruntime

from sdonnx.errors import ProviderError
from sdonnx.installation import install_command

__all__ = ["CapturedGraph", "Cuda", "Event", "cuda", "small_workspaces"]

# ONNX Runtime 1.31 is built for CUDA 13, and older builds for CUDA 12.
_LIBRARIES = ("libcudart.so.13", "libcudart.so.12")
_HOST_TO_DEVICE = 1
_DEVICE_TO_DEVICE = 3
_NON_BLOCKING = 1
# Other threads may allocate memory during the capture.
_CAPTURE_THREAD_LOCAL = 1
_MIN_SPARE = 2**20

# cuBLAS allocates 32 MB for each handle on sm_90 by default, and ONNX Runtime creates two handles for each session. Two
# buffers of 4 MB are as fast (docs/decisions/0034).
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:2")

# cudaDevAttrComputeCapabilityMajor and -Minor (driver_types.h).
_CAPABILITY = (75, 76)


class Cuda:
    """The CUDA runtime of one device, with the stream of all graphs.

    Graphs share their scratch memory, which is safe because they run one after another on this stream.

    Args:
        index: index of the GPU.

    Attributes:
        recording: lock that is held while a CUDA graph is captured, when no other thread may use the stream.

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
        """Select the device for the calling thread."""
        self._check(self._library.cudaSetDevice(self.index))

    def synchronize(self) -> None:
        """Wait until all work on the stream is done."""
        self._check(self._library.cudaStreamSynchronize(self._stream))

    def memory(self) -> tuple[int, int]:
        """Return the free and the total memory of the device in bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
        return free.value, total.value

    def capability(self) -> tuple[int, int]:
        """Return the compute capability (major, minor) of the device: (9, 0) for sm_90."""
        numbers = []
        for attribute in _CAPABILITY:
            number = ctypes.c_int()
            self._check(self._library.cudaDeviceGetAttribute(ctypes.byref(number), attribute, self.index))
            numbers.append(number.value)
        return numbers[0], numbers[1]

    def copy(self, target: int, source: int, size: int, *, from_host: bool = False) -> None:
        """Copy `size` bytes between two addresses of the device, or from one of the host, and wait."""
        self._check(
            self._library.cudaMemcpyAsync(
                ctypes.c_void_p(target),
                ctypes.c_void_p(source),
                ctypes.c_size_t(size),
                _HOST_TO_DEVICE if from_host else _DEVICE_TO_DEVICE,
                self._stream,
            )
        )
        self.synchronize()

    @contextmanager
    def spare(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes of the device's memory in the context, or a half, a quarter, ... of them if short."""
        held = ctypes.c_void_p()
        missing = 1
        while missing and size >= _MIN_SPARE:
            missing = self._library.cudaMalloc(ctypes.byref(held), ctypes.c_size_t(size))
            if missing:
                self._library.cudaGetLastError()  # or the next call that queries the error sees it
            size //= 2
        try:
            yield
        finally:
            if not missing:
                self._library.cudaFree(held)

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Capture the work that `work` queues on the stream, without running it, as a graph to launch.

        Raises:
            ProviderError: some of the work cannot be captured, such as an allocation.
        """
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._library.cudaStreamBeginCapture(self._stream, _CAPTURE_THREAD_LOCAL))
        try:
            work()
        except BaseException:
            # End the capture, which may not return a graph.
            if not self._library.cudaStreamEndCapture(self._stream, ctypes.byref(graph)) and graph:
                self._library.cudaGraphDestroy(graph)
            self._library.cudaGetLastError()
            raise
        self._check(self._library.cudaStreamEndCapture(self._stream, ctypes.byref(graph)))
        try:
            self._check(self._library.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
            # Otherwise the first launch uploads the graph.
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
        """Release a captured graph that is not running."""
        self._library.cudaGraphExecDestroy(executable)

    def event(self) -> Event:
        """Return an event that marks the end of all work queued so far."""
        handle = ctypes.c_void_p()
        self._check(self._library.cudaEventCreate(ctypes.byref(handle)))
        event = Event(self._library, handle)
        self._check(self._library.cudaEventRecord(handle, self._stream))
        return event

    def wait(self, event: Event) -> None:
        """Wait for an event."""
        self._check(self._library.cudaEventSynchronize(event.handle))

    def milliseconds(self, start: Event, end: Event) -> float:
        """Wait for two events and return the time between them in ms on the device's clock."""
        elapsed = ctypes.c_float()
        self.wait(end)
        self._check(self._library.cudaEventElapsedTime(ctypes.byref(elapsed), start.handle, end.handle))
        return elapsed.value

    def _check(self, status: int) -> None:
        if status:
            self._library.cudaGetLastError()  # or ONNX Runtime sees it after its next kernel
            self._library.cudaGetErrorString.restype = ctypes.c_char_p
            reason = self._library.cudaGetErrorString(status).decode()
            raise ProviderError(f"CUDA reports {reason!r} for GPU {self.index}", "a working GPU", "check nvidia-smi")


class CapturedGraph:
    """A captured CUDA graph, released with the object."""

    def __init__(self, runtime: Cuda, executable: ctypes.c_void_p) -> None:
        self._runtime, self._executable = runtime, executable

    def launch(self) -> None:
        """Queue the graph after all work queued so far."""
        self._runtime.launch(self._executable)

    def release(self) -> None:
        """Release the graph, which must not be running."""
        if self._executable:
            self._runtime.destroy(self._executable)
            self._executable = ctypes.c_void_p()

    def __del__(self) -> None:
        """Release the graph."""
        self.release()


class Event:
    """A CUDA event, released with the object."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self.handle = library, handle

    def __del__(self) -> None:
        """Release the event; CUDA keeps a queued event until it is reached."""
        self._library.cudaEventDestroy(self.handle)


def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise ProviderError(
        f"none of {', '.join(_LIBRARIES)} could be loaded", "the CUDA libraries", install_command("cuda")
    )


@functools.cache
def cuda(index: int) -> Cuda:
    """Return the CUDA runtime of a device, one for the process, and register its arena for scratch memory.

    ONNX Runtime keeps the arena as long as the process lives.
    """
    runtime = Cuda(index)
    info = onnxruntime.OrtMemoryInfo(
        "Cuda", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, index, onnxruntime.OrtMemType.DEFAULT
    )
    # 1 is kSameAsRequested; the default doubles the arena as it grows, up to twice the memory in use.
    arena = onnxruntime.OrtArenaCfg({"max_mem": 0, "arena_extend_strategy": 1})
    onnxruntime.create_and_register_allocator_v2(
        "CUDAExecutionProvider", info, {"device_id": str(index), "user_compute_stream": str(runtime.stream)}, arena
    )
    return runtime


class _SmallWorkspaces:
    """Sets the environment variable of cuBLAS's workspaces for as long as one thread or several need it.

    It is set before the first of them starts to load, and removed after the last one, since C code that reads the
    environment must not run while another thread changes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._is_set = False

    def __enter__(self) -> None:
        name, value = _WORKSPACE
        with self._lock:
            if not self._users and name not in os.environ:
                os.environ[name] = value
                self._is_set = True
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._is_set:
                del os.environ[_WORKSPACE[0]]
                self._is_set = False


_SMALL_WORKSPACES = _SmallWorkspaces()


def small_workspaces() -> AbstractContextManager[None]:
    """Limit the memory of cuBLAS handles created in the context, unless the environment sets a limit.

    Several threads may be in the context at the same time.
    """
    return _SMALL_WORKSPACES
