# The compiled module that shim/abi_build.py makes of the shared header: structures by cffi, no functions of our own.
from typing import Any

ffi: Any
lib: Any
