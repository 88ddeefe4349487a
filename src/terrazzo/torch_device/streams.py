"""Streams and events by the names of torch.cuda, made of those that torch has for any device."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.torch_device.start import name, start


def index_of(device: Any = None) -> int:
    """The number of a device: of None the current one; a number, a text, a torch.device."""
    start()
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    made = torch.device(device)
    if made.type != name():
        raise ValueError(f"expected a device of type {name()}, got {made}")
    return torch.accelerator.current_device_index() if made.index is None else made.index


class Stream(torch.Stream):
    """Work that runs in the order in which it was given, beside that of other streams."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        start()
        if given:  # a stream that exists: stream_id, device_index, device_type
            return super().__new__(cls, **given)
        at = torch.device(name(), index_of(device))
        return super().__new__(cls, device=at, priority=priority)

    def wait_event(self, event: Any) -> None:
        """What is given to this stream from now on waits for an event."""
        event.wait(self)

    def __repr__(self) -> str:
        return f"<torch.{name()}.Stream device={self.device} id={self.stream_id:#x}>"


class _Events(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == name()


class Event(metaclass=_Events):
    """A place in a stream: to wait for, or to take the (modelled) time at.

    What is made is a torch.Event: torch takes no subclass of it in `elapsed_time`.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False,
                interprocess: bool = False) -> Any:
        start()
        return torch.Event(device=torch.device(name()), enable_timing=enable_timing,
                           blocking=blocking, interprocess=interprocess)


class StreamContext:
    """The current stream for the length of a `with`; of None nothing changes."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.before: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = torch.accelerator.current_stream(self.stream.device)
            self.device = torch.accelerator.current_device_index()
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        if self.before is not None:
            torch.accelerator.set_stream(self.before)
            torch.accelerator.set_device_index(self.device)


def stream(stream: Any) -> StreamContext:
    """Make a stream the current one for the length of a `with`."""
    return StreamContext(stream)


def _ours(found: Any) -> Stream:
    return Stream(stream_id=found.stream_id, device_index=found.device_index,
                  device_type=found.device_type)


def current_stream(device: Any = None) -> Stream:
    """The stream that work of this thread is given to."""
    return _ours(torch.accelerator.current_stream(index_of(device)))


def current_stream_handle() -> int | None:
    """The current stream of the current device as the runtime library knows it."""
    return start().current_stream_handle() or None


def default_stream(device: Any = None) -> Stream:
    """The stream that is current before another one is made so."""
    return Stream(stream_id=0, device_index=index_of(device),
                  device_type=int(torch._C._autograd.DeviceType.PrivateUse1))


def set_stream(stream: Any) -> None:
    """Make a stream the current one."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


__all__ = ["Event", "Stream", "StreamContext", "current_stream",
           "current_stream_handle", "default_stream", "index_of", "set_stream", "stream"]
