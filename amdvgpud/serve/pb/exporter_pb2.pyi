from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GpuStates(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[GpuState]
    def __init__(self, states: _Optional[_Iterable[_Union[GpuState, _Mapping]]] = ...) -> None: ...

class GpuState(_message.Message):
    __slots__ = ("health", "device")
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    health: str
    device: str
    def __init__(self, health: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...
